"""How a layer's experts are stored: which tensors are w13 and w2, and which way round they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.canonical import Group
from reshard.config import ModelConfig
from reshard.errors import WeightsError, quoted
from reshard.layout import FUSED, PER_EXPERT, TRANSPOSED
from reshard.names import parse_expert, parse_fused
from reshard.runtime.config import MoeConfig

FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"

Key = tuple[str, str]
"""What a tensor is in an experts module: (`gate_up` or `down`, suffix)."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The layout of one experts module, proved against the config.

    form: fused `[E, 2I, H]` and `[E, H, I]`, fused_transposed (the last two axes swapped) or
    per_expert. weight, scale: suffixes of the weights and of their scales, if they have any.
    note: what is unusual about it.
    """

    form: str
    weight: str
    scale: str | None
    note: str | None = None


def module_of(name: str) -> tuple[str, Key] | None:
    """The experts module of a tensor (`....layers.3.mlp.experts`) and what it is there."""
    if one := parse_expert(name):
        return one.module, ("down" if one.proj == "down" else "gate_up", one.suffix)
    if whole := parse_fused(name):
        return whole.module, (whole.proj, whole.suffix)
    return None


def experts_in(groups: Mapping[Key, list[Group]]) -> int:
    """The number of experts of a module."""
    tensors = [tensor for found in groups.values() for group in found for tensor in group]
    separate = [one.expert for t in tensors if (one := parse_expert(t.name))]
    if separate:
        return 1 + max(separate)
    fused = [tensor.shape for tensor in tensors if len(tensor.shape) > 1]
    return max((shape[0] for shape in fused), default=0)


def layout_of(module: str, groups: Mapping[Key, list[Group]], config: MoeConfig) -> ExpertLayout:
    """The layout of a module of these tensors.

    Raises `WeightsError` where the forward cannot run it: another format than BF16, F16, F32, F64 or
    FP8 in blocks; shapes that contradict config.json, or each other.
    """
    separate = {parse_expert(g[0].name) is not None for found in groups.values() for g in found}
    if len(separate) > 1:
        raise _format_error(module, groups, config.model)
    per_expert = separate == {True}
    weight = "weight" if per_expert else ""
    gate_up, down = groups.get(("gate_up", weight)), groups.get(("down", weight))
    dtypes = {group[0].dtype for found in (gate_up, down) if found for group in found}
    scale = None
    if dtypes == {FP8} and config.block is not None:
        scale = f"{weight}_scale_inv"
    suffixes = [weight] if scale is None else [weight, scale]
    wanted = {(proj, suffix) for proj in ("gate_up", "down") for suffix in suffixes}
    lacking = "down" if gate_up and not down else "gate_up" if down and not gate_up else None
    if lacking:
        raise WeightsError(
            f"{quoted(module)}: there is no {lacking}_proj beside the other",
            hint="the checkpoint lacks weights of this layer; look at it with reshard inspect",
        )
    plain = len(dtypes) == 1 and dtypes <= {*FLOATS}
    if not (gate_up and down and groups.keys() == wanted and (plain or scale is not None)):
        raise _format_error(module, groups, config.model)
    for key, found in groups.items():
        if len(found) > 1:
            raise WeightsError(
                f"{quoted(module)}: its experts have {key[0]}_proj tensors that differ in dtype or "
                "shape, or some lack one",
                hint="a fused forward needs the same tensors for every expert",
            )
    shapes = {key: _shape(found[0]) for key, found in groups.items()}
    form, note = PER_EXPERT, None
    if per_expert:
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        expected = {"gate_up": (experts, 2, inner, hidden), "down": (experts, hidden, inner)}
        if any(shapes[proj, weight] != shape for proj, shape in expected.items()):
            raise _contradiction_error(module, shapes, weight, config)
    else:
        form, note = _orientation(module, shapes, config)
    if scale is not None:
        scales = groups["gate_up", scale][0], groups["down", scale][0]
        if not {group[0].dtype for group in scales} <= {*FLOATS}:
            raise _format_error(module, groups, config.model)
        _check_scales(module, form, shapes, scale, config)
    return ExpertLayout(form, weight, scale, note)


def _shape(group: Group) -> tuple[int, ...]:
    """`[E, ...]`, and `[E, 2, ...]` for the gate and up of separate experts."""
    one = parse_expert(group[0].name)
    if one is None:
        return group[0].shape
    if one.proj == "down":
        return (len(group), *group[0].shape)
    return (len(group) // 2, 2, *group[0].shape)


def _orientation(
    module: str, shapes: Mapping[Key, tuple[int, ...]], config: MoeConfig
) -> tuple[str, str | None]:
    """Which way round fused experts lie: as the family is released, if both tensors can be that.

    Else the other way round, as transformers saves Qwen3-VL anew, if neither leaves a doubt.
    """
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    straight = {"gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}
    swapped = {proj: (e, columns, rows) for proj, (e, rows, columns) in straight.items()}
    transposed = config.model.family.transposed_experts
    released, other = (swapped, straight) if transposed else (straight, swapped)
    found = {proj: shapes[proj, ""] for proj in straight}
    if found == released:
        return (TRANSPOSED if transposed else FUSED), None
    if found == other and all(found[proj] != released[proj] for proj in found):
        form = FUSED if transposed else TRANSPOSED
        note = f"{module} is stored as {form}, other than {config.model.model_type} is released"
        return form, note
    raise _contradiction_error(module, shapes, "", config)


def _check_scales(
    module: str, form: str, shapes: Mapping[Key, tuple[int, ...]], scale: str, config: MoeConfig
) -> None:
    """A scale for each block; rows of gate and up are rounded up to blocks one by one."""
    assert config.block is not None
    rows, columns = config.block
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    halves = (2, -(-inner // rows)) if form == PER_EXPERT else (2 * -(-inner // rows),)
    gate_up = (experts, *halves, -(-hidden // columns))
    down = (experts, -(-hidden // rows), -(-inner // columns))
    found = shapes["gate_up", scale], shapes["down", scale]
    if form == TRANSPOSED or found != (gate_up, down):
        raise WeightsError(
            f"{quoted(module)}: scales {found[0]} and {found[1]} do not fit weights stored as {form} "
            f"in blocks of {rows} x {columns}: expected {gate_up} and {down}",
            hint="weight_block_size of config.json and the weights do not belong together",
        )


def _contradiction_error(
    module: str, shapes: Mapping[Key, tuple[int, ...]], weight: str, config: MoeConfig
) -> WeightsError:
    gate_up, down = shapes["gate_up", weight], shapes["down", weight]
    return WeightsError(
        f"{quoted(module)}: gate_up_proj {gate_up} and down_proj {down} fit neither each other nor "
        f"config.json: {config.num_experts} experts, hidden size {config.hidden_size}, expert size "
        f"{config.intermediate_size}, {config.model.model_type}",
        hint="the weights and config.json are of different models, or the weights were transposed "
        "in part",
    )


def _format_error(
    module: str, groups: Mapping[Key, list[Group]], model: ModelConfig
) -> WeightsError:
    found = sorted(
        {
            (suffix or "(no suffix)", group[0].dtype)
            for (_, suffix), stored in groups.items()
            for group in stored
        }
    )
    what = ", ".join(f"{quoted(suffix)} {dtype}" for suffix, dtype in found)
    method = f" ({quoted(model.quant_method)})" if model.quant_method else ""
    return WeightsError(
        f"{quoted(module)}: its experts are stored as {what}{method}; the forward runs BF16, F16, "
        "F32, F64, and FP8 (F8_E4M3) with weight_scale_inv in the blocks of config.json",
        hint="the stage loads, its tensors are in StageWeights.tensors",
    )
