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
    """`rows` pieces of a file of `row_bytes` each, `stride` bytes from one to the next.

    In memory they lie side by side, from `at` on. One row, or rows without gaps, are a plain range.
    """

    file: str
    begin: int
    rows: int
    row_bytes: int
    stride: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def is_range(self) -> bool:
        return self.rows == 1 or self.row_bytes == self.stride

    def continues(self, other: Strip) -> bool:
        """Whether it goes on, in file and memory, where `other` ends, with rows like those."""
        return (
            (self.file, self.row_bytes, self.stride) == (other.file, other.row_bytes, other.stride)
            and self.begin == other.begin + other.rows * other.stride
            and self.at == other.at + other.nbytes
        )


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


class Rank(NamedTuple):
    """A rank's number in its group, and the size of the group."""

    rank: int
    size: int

    def part_of(self, count: int) -> range:
        """Its part of `count` things: as many for all ranks, or one more for some."""
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

    def of_modules(self) -> dict[str, dict[Key, list[Share]]]:
        """The shares of every experts module, by what they are there."""
        found: dict[str, dict[Key, list[Share]]] = {}
        for share in self.shares:
            if named := module_of(share.names[0]):
                module, key = named
                found.setdefault(module, {}).setdefault(key, []).append(share)
        return found


def plan_share(
    components: Iterable[Sequence[TensorInfo]], ep: Rank, tp: Rank, config: MoeConfig | None
) -> StageShare:
    """What the rank `ep`, `tp` holds of these components (each with all of its tensors).

    config: needed under tensor parallelism. Raises `UsageError` where experts or rows cannot be
    divided, `WeightsError` where tensor parallelism meets weights that it cannot divide.
    """
    shares: list[Share] = []
    all_modules: dict[str, ExpertModule] = {}
    filled: dict[str, int] = {}
    for tensors in components:
        groups = canonical_order(tensors)
        modules = _modules(groups, ep)
        all_modules |= modules
        cuts: Mapping[str, _Cut] = {}
        if tp.size > 1:
            assert config is not None
            cuts = _cuts(groups, modules, config)
        for group in groups:
            takes = [
                _tp_take(take, cut, tp) if (cut := cuts.get(take.name)) else take
                for tensor in group
                if (take := _ep_take(tensor, modules)) is not None
            ]
            if not takes:  # of experts that other ranks hold
                continue
            file = takes[0].file
            at = -(-filled.get(file, 0) // ALIGNMENT) * ALIGNMENT
            strips = tuple(_side_by_side(takes, at))
            filled[file] = at + sum(strip.nbytes for strip in strips)
            names = tuple(take.name for take in takes)
            shares.append(Share(names, group[0].dtype, takes[0].shape, file, at, strips))
    return StageShare(tuple(shares), all_modules)


def _modules(groups: Sequence[Group], ep: Rank) -> dict[str, ExpertModule]:
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
                "ranks",
                hint="there can be as many ranks as experts, or fewer",
            )
        modules[module] = ExpertModule(parts, count, ep.part_of(count))
    return modules


class _Take(NamedTuple):
    """What is taken of one tensor: `rows` of `row_bytes`, `stride` bytes apart."""

    name: str
    shape: tuple[int, ...]
    file: str
    begin: int
    rows: int
    row_bytes: int
    stride: int


def _ep_take(tensor: TensorInfo, modules: Mapping[str, ExpertModule]) -> _Take | None:
    """The tensor, or the range of experts in it that is here; None for one of another expert."""
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
    return _Take(tensor.name, shape, tensor.file, begin, 1, nbytes, nbytes)


class _Cut(NamedTuple):
    """The axis of a tensor that tensor parallelism divides: the same part of each of `halves`.

    multiple_of: what every part must be a multiple of, so that it has scales of its own.
    """

    axis: int
    halves: int
    multiple_of: int


_AXES = {
    (FUSED, "gate_up"): (1, 2),
    (FUSED, "down"): (2, 1),
    (TRANSPOSED, "gate_up"): (2, 2),
    (TRANSPOSED, "down"): (1, 1),
    (PER_EXPERT, "gate_up"): (0, 1),
    (PER_EXPERT, "down"): (1, 1),
}
"""Where the expert size I is: the axis of a tensor, and 2 halves if gate and up share that axis."""


def _cuts(
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
        multiple_of = 1
        if tensor.dtype == FP8 and config.block:
            block_rows, block_columns = config.block
            divides_columns = axis == len(tensor.shape) - 1
            multiple_of = block_columns if divides_columns else block_rows
        cuts[tensor.name] = _Cut(axis, halves, multiple_of)
    return cuts


def _tp_take(whole: _Take, cut: _Cut, tp: Rank) -> _Take:
    """The rank's part of an axis, of what is taken as one row so far."""
    width = whole.shape[cut.axis] // cut.halves
    part = tp.part_of(width)
    if width % tp.size or len(part) % cut.multiple_of:
        blocks = f" in multiples of {cut.multiple_of}" if cut.multiple_of > 1 else ""
        sizes = [n for n in range(1, width + 1) if width % (n * cut.multiple_of) == 0]
        raise UsageError(
            f"{quoted(whole.name)}: its {width} rows or columns cannot be divided among {tp.size} "
            f"ranks{blocks}",
            hint=f"sizes of tp that would do: {', '.join(map(str, sizes[:16])) or 1}; or use ep",
        )
    if whole.row_bytes == 0:
        return whole
    rows = prod(whole.shape[: cut.axis]) * cut.halves
    stride = whole.row_bytes // rows
    step = stride // width
    return whole._replace(
        shape=(*whole.shape[: cut.axis], cut.halves * len(part), *whole.shape[cut.axis + 1 :]),
        begin=whole.begin + part.start * step,
        rows=rows,
        row_bytes=len(part) * step,
        stride=stride,
    )


def _side_by_side(takes: Iterable[_Take], at: int) -> Iterator[Strip]:
    """What fills a buffer from `at` on, in as few strips as can be: a run is one, not hundreds."""
    last: Strip | None = None
    for take in takes:
        strip = Strip(take.file, take.begin, take.rows, take.row_bytes, take.stride, at)
        at += strip.nbytes
        if last is not None and strip.continues(last):
            last = last._replace(rows=last.rows + strip.rows)
            continue
        if last is not None:
            yield last
        last = strip
    if last is not None:
        yield last
