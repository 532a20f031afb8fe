"""How a checkpoint stores its experts: fused, fused and transposed, or one tensor per expert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from reshard.config import ModelConfig
from reshard.errors import CheckpointError, quoted
from reshard.header import TensorInfo
from reshard.names import parse_expert, parse_fused

FUSED = "fused"
TRANSPOSED = "fused_transposed"
PER_EXPERT = "per_expert"
MIXED = "mixed"
NONE = "none"


@dataclass(frozen=True, slots=True)
class ExpertLayouts:
    """The layout of every experts module (`<layer prefix>.mlp.experts`) of a checkpoint."""

    modules: Mapping[str, str]
    warnings: tuple[str, ...]

    def of(self, *, mtp: bool) -> str:
        """The one layout of the body's (or mtp's) modules; `mixed` if they differ; else `none`."""
        found = {v for name, v in self.modules.items() if name.startswith("mtp.") == mtp}
        if len(found) > 1:
            return MIXED
        return found.pop() if found else NONE


@dataclass(frozen=True, slots=True)
class ExpertForms:
    """What the names say of the experts modules.

    per_expert: module -> {(proj, suffix): number of experts}; fused: module -> {proj: shape}.
    """

    per_expert: Mapping[str, Mapping[tuple[str, str], int]]
    fused: Mapping[str, Mapping[str, tuple[int, ...]]]

    @classmethod
    def of(cls, tensors: Iterable[TensorInfo]) -> ExpertForms:
        per_expert: dict[str, dict[tuple[str, str], int]] = {}
        fused: dict[str, dict[str, tuple[int, ...]]] = {}
        for tensor in tensors:
            if ".experts." not in tensor.name:
                continue
            if one := parse_expert(tensor.name):
                counts = per_expert.setdefault(one.module, {})
                key = (one.proj, one.suffix)
                counts[key] = counts.get(key, 0) + 1
            elif whole := parse_fused(tensor.name):
                shapes = fused.setdefault(whole.module, {})
                if not whole.suffix:
                    shapes[whole.proj] = tensor.shape
        return cls(per_expert, fused)

    def clash(self, other: ExpertForms) -> str | None:
        """A module that one side has fused and the other per expert."""
        clashes = self.per_expert.keys() & other.fused.keys()
        clashes |= self.fused.keys() & other.per_expert.keys()
        return min(clashes, default=None)


def expert_layouts(tensors: Iterable[TensorInfo], config: ModelConfig) -> ExpertLayouts:
    """Look at every experts module among `tensors`.

    Raises `CheckpointError` where a module has both fused and per-expert tensors: engines then
    leave layers unloaded (SGLang switches to fused names for the rest of the stream).
    """
    forms = ExpertForms.of(tensors)
    both = sorted(forms.per_expert.keys() & forms.fused.keys())
    if both:
        raise CheckpointError(
            f"{quoted(both[0])} has both fused and per-expert tensors "
            f"({len(both)} modules in all); engines would leave layers unloaded",
            hint="keep one form: leave the file with the other out with --ignore-file",
        )
    modules = dict.fromkeys(forms.per_expert, PER_EXPERT)
    for module, shapes in forms.fused.items():
        modules[module] = _orientation(shapes, config)
    return ExpertLayouts(modules, tuple(_warnings(modules, forms, config)))


def _family_layout(config: ModelConfig) -> str:
    return TRANSPOSED if config.family.transposed_experts else FUSED


def _orientation(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> str:
    """Fused `[E, 2I, H]` and `[E, H, I]`, or both with the last two dimensions swapped.

    Where the shapes cannot tell (H == 2I, packed weights), it is the family's released layout.
    """
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    if hidden is None or inner is None:
        return _family_layout(config)
    straight = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    votes = set()
    for proj, shape in shapes.items():
        rows_columns = straight[proj]
        fits = shape[-2:] == rows_columns
        fits_transposed = shape[-2:] == rows_columns[::-1]
        if fits != fits_transposed:
            votes.add(FUSED if fits else TRANSPOSED)
    return votes.pop() if len(votes) == 1 else _family_layout(config)


def _warnings(modules: Mapping[str, str], forms: ExpertForms, config: ModelConfig) -> Iterator[str]:
    released = _family_layout(config)
    foreign = [module for module in forms.fused if modules[module] != released]
    if foreign:
        yield (
            f"{len(foreign)} modules hold experts as {modules[foreign[0]]}, but {config.model_type} "
            f"is released as {released}, which is what SGLang and vLLM expect"
        )
    uneven = [m for m, counts in forms.per_expert.items() if len(set(counts.values())) > 1]
    if uneven:
        yield (
            f"{quoted(min(uneven))}: not every expert has the same tensors "
            f"({len(uneven)} modules in all)"
        )
    experts = {module: max(counts.values()) for module, counts in forms.per_expert.items()}
    for module, shapes in forms.fused.items():
        experts |= [(module, shape[0]) for shape in shapes.values() if len(shape) == 3]
    wrong = [module for module, count in experts.items() if count != config.num_experts]
    if wrong and config.num_experts is not None:
        yield (
            f"{quoted(min(wrong))} has {experts[min(wrong)]} experts, config.json says "
            f"{config.num_experts} ({len(wrong)} modules in all)"
        )
