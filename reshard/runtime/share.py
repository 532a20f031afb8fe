"""A rank's share of a stage: which bytes of each tensor it holds, and where they come to lie.

Expert parallelism (ep) takes a range of the experts, tensor parallelism (tp) the same part of the
rows of gate, of the rows of up, and of the columns of down, of each expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from reshard.canonical import Group, canonical_order
from reshard.errors import UsageError, WeightsError, quoted
from reshard.header import TensorInfo
from reshard.layout import FUSED, PER_EXPERT, TRANSPOSED
from reshard.names import parse_expert
from reshard.runtime.config import MoeConfig
from reshard.runtime.expert_layout import (
    FLOATS,
    FP8,
    Key,
    experts_in,
    layout_of,
    module_of,
)
from reshard.units import counted

ALIGNMENT = 256
"""Every group starts at a multiple of this many bytes in its buffer, as kernels like it."""

_SHARED = ".mlp.shared_expert."


class Strip(NamedTuple):
    """Equally long pieces of a file, `stride` bytes apart; they come to lie side by side, from `at`.

    One piece (or pieces without gaps) is a plain range of bytes.
    """

    file: str
    begin: int
    pieces: int
    piece_bytes: int
    stride: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def is_range(self) -> bool:
        return self.pieces == 1 or self.piece_bytes == self.stride


@dataclass(frozen=True, slots=True)
class Share:
    """What the rank holds of a tensor, or of a run of experts' tensors: `names`, each of `shape`.

    They lie side by side in the buffer of the file `file`, from byte `at`; `strips` are where they
    come from, in this order.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    file: str
    at: int
    strips: tuple[Strip, ...]

    @property
    def nbytes(self) -> int:
        return sum(strip.nbytes for strip in self.strips)


class Part(NamedTuple):
    """The place of a rank in a group of ranks."""

    rank: int
    size: int

    def of(self, count: int) -> range:
        """Its part of `count` things: the same for all ranks, or one more for some."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


@dataclass(frozen=True, slots=True)
class ExpertModule:
    """An experts module: its groups as stored, and which of its `num_experts` this rank holds."""

    groups: Mapping[Key, list[Group]]
    num_experts: int
    here: range


@dataclass(frozen=True, slots=True)
class StageShare:
    """All that a rank holds: in the order of files and their bytes, and experts by module."""

    shares: tuple[Share, ...]
    modules: Mapping[str, ExpertModule]

    def buffer_bytes(self) -> dict[str, int]:
        """How large the buffer of each file has to be."""
        return {share.file: share.at + share.nbytes for share in self.shares}

    def of_module(self, module: str) -> dict[Key, list[Share]]:
        """The shares of an experts module, by what they are there."""
        found: dict[Key, list[Share]] = {}
        for share in self.shares:
            named = module_of(share.names[0])
            if named is not None and named[0] == module:
                found.setdefault(named[1], []).append(share)
        return found


def plan_share(
    components: Iterable[Sequence[TensorInfo]], ep: Part, tp: Part, config: MoeConfig | None
) -> StageShare:
    """What the rank `ep`, `tp` holds of these components (each with all of its tensors).

    config: needed under tensor parallelism. Raises `UsageError` where experts or rows cannot be
    divided, `WeightsError` where tensor parallelism meets weights that it cannot divide.
    """
    shares: list[Share] = []
    modules: dict[str, ExpertModule] = {}
    filled: dict[str, int] = {}
    for tensors in components:
        groups = canonical_order(tensors)
        modules |= _modules(groups, ep)
        cut_axis = _cut_axes(groups, modules, config) if tp.size > 1 and config else {}
        for group in groups:
            takes = [
                take
                for tensor in group
                if (take := _take(tensor, modules, cut_axis.get(tensor.name), tp)) is not None
            ]
            if not takes:  # of experts that other ranks hold
                continue
            file = takes[0].strip.file
            at = -(-filled.get(file, 0) // ALIGNMENT) * ALIGNMENT
            strips = tuple(_side_by_side((take.strip for take in takes), at))
            filled[file] = at + sum(strip.nbytes for strip in strips)
            names = tuple(take.name for take in takes)
            shares.append(Share(names, group[0].dtype, takes[0].shape, file, at, strips))
    return StageShare(tuple(shares), modules)


def _modules(groups: Sequence[Group], ep: Part) -> dict[str, ExpertModule]:
    """The experts modules among the groups."""
    found: dict[str, dict[Key, list[Group]]] = {}
    for group in groups:
        if named := module_of(group[0].name):
            found.setdefault(named[0], {}).setdefault(named[1], []).append(group)
    modules = {}
    for module, parts in found.items():
        count = experts_in(parts)
        if count < ep.size > 1:
            raise UsageError(
                f"{quoted(module)}: {counted(count, 'expert')} cannot be divided among {ep.size} "
                "ranks"
            )
        modules[module] = ExpertModule(parts, count, ep.of(count))
    return modules


class _Cut(NamedTuple):
    """The axis of a tensor that tensor parallelism divides: the same part of each of `halves`.

    multiple_of: what every part must be a multiple of, so that it has scales of its own.
    """

    axis: int
    halves: int
    multiple_of: int


def _cut_axes(
    groups: Sequence[Group], modules: Mapping[str, ExpertModule], config: MoeConfig
) -> dict[str, _Cut]:
    """The cuts of all tensors of experts and shared experts."""
    cuts: dict[str, _Cut] = {}
    layouts = {name: layout_of(name, m.groups, config) for name, m in modules.items()}
    for tensor in (tensor for group in groups for tensor in group):
        if named := module_of(tensor.name):
            module, (proj, _) = named
            axis, halves = _AXES[layouts[module].form, proj]
        elif _SHARED in tensor.name:
            suffix = tensor.name.rpartition("_proj.")[2]
            known = suffix in ("weight", "weight_scale_inv") and tensor.dtype in (*FLOATS, FP8)
            if not known or len(tensor.shape) != 2:
                raise WeightsError(
                    f"{quoted(tensor.name)}: tensor parallelism cannot divide {tensor.dtype} "
                    f"{[*tensor.shape]} here",
                    hint="load the stage without tp",
                )
            axis, halves = (1 if ".down_proj." in tensor.name else 0), 1
        else:
            continue
        block = config.block if tensor.dtype == FP8 and config.block else (1, 1)
        cuts[tensor.name] = _Cut(axis, halves, block[axis == len(tensor.shape) - 1])
    return cuts


_AXES = {
    (FUSED, "gate_up"): (1, 2),
    (FUSED, "down"): (2, 1),
    (TRANSPOSED, "gate_up"): (2, 2),
    (TRANSPOSED, "down"): (1, 1),
    (PER_EXPERT, "gate_up"): (0, 1),
    (PER_EXPERT, "down"): (1, 1),
}
"""Where the intermediate size is: the axis of a tensor, and whether gate and up share it."""


class _Take(NamedTuple):
    """What is taken of one tensor."""

    name: str
    shape: tuple[int, ...]
    strip: Strip


def _take(
    tensor: TensorInfo, modules: Mapping[str, ExpertModule], cut: _Cut | None, tp: Part
) -> _Take | None:
    """What the rank holds of a tensor; None for one of an expert that it does not hold."""
    begin, nbytes, shape = tensor.begin, tensor.nbytes, tensor.shape
    if named := module_of(tensor.name):
        module = modules[named[0]]
        one = parse_expert(tensor.name)
        if one is not None and one.expert not in module.here:
            return None
        if one is None and module.num_experts and shape[:1] == (module.num_experts,):
            per_expert = nbytes // module.num_experts
            begin, nbytes = begin + module.here.start * per_expert, len(module.here) * per_expert
            shape = (len(module.here), *shape[1:])
    if cut is None or nbytes == 0:
        return _Take(tensor.name, shape, Strip(tensor.file, begin, 1, nbytes, nbytes, 0))
    width = shape[cut.axis] // cut.halves
    part = tp.of(width)
    if width % tp.size or len(part) % cut.multiple_of:
        blocks = f" in multiples of {cut.multiple_of}" if cut.multiple_of > 1 else ""
        raise UsageError(
            f"{quoted(tensor.name)}: its {width} rows or columns cannot be divided among {tp.size} "
            f"ranks{blocks}",
            hint="choose another size of tp, or divide the experts instead: ep",
        )
    pieces = prod(shape[: cut.axis]) * cut.halves
    stride = nbytes // pieces
    step = stride // width
    strip = Strip(tensor.file, begin + part.start * step, pieces, len(part) * step, stride, 0)
    shape = (*shape[: cut.axis], cut.halves * len(part), *shape[cut.axis + 1 :])
    return _Take(tensor.name, shape, strip)


def _side_by_side(strips: Iterable[Strip], at: int) -> Iterator[Strip]:
    """Strips that fill a buffer from `at` on, as few as possible: a run is one, not hundreds."""
    last: Strip | None = None
    for strip in strips:
        strip = strip._replace(at=at)
        at += strip.nbytes
        if last is not None:
            follows = strip._replace(pieces=0, at=0) == last._replace(
                begin=last.begin + last.pieces * last.stride, pieces=0, at=0
            )
            if follows:
                last = last._replace(pieces=last.pieces + strip.pieces)
                continue
            yield last
        last = strip
    if last is not None:
        yield last
