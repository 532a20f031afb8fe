"""The canonical files of a component: which tensors, in which order, under which header.

A function of the tensors alone. docs/bundle-format.md states the rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reshard.errors import HeaderError, PlanError
from reshard.header import TensorInfo, encode_header
from reshard.names import Component, natural_key, parse_expert

MAX_TENSOR_BYTES = 20_000_000_000
"""Tensor bytes a file may hold, unless a single group is larger."""

Group = tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A canonical weight file. `header_bytes` includes the eight length bytes."""

    name: str
    component: Component
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    header_bytes: int
    header_sha256: str
    tensor_bytes: int

    @property
    def size(self) -> int:
        return self.header_bytes + self.tensor_bytes


def plan_files(
    component: Component, tensors: Iterable[TensorInfo], max_bytes: int = MAX_TENSOR_BYTES
) -> tuple[FilePlan, ...]:
    """The files of a component: one, or several where its tensors exceed `max_bytes`.

    Raises `PlanError` where a header would be larger than readers accept.
    """
    parts: list[list[TensorInfo]] = [[]]
    filled = 0
    for group in canonical_order(tensors):
        size = _nbytes(group)
        if parts[-1] and filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1] += group
        filled += size
    files = []
    for number, part in enumerate(parts, 1):
        cut = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        try:
            header = encode_header(part)
        except HeaderError as error:
            hint = "readers refuse such files; the checkpoint has too many or too long names"
            raise PlanError(f"{component.stem}: {error.message}", hint=hint) from None
        files.append(
            FilePlan(
                name=f"{component.stem}{cut}.safetensors",
                component=component,
                tensors=tuple(part),
                header_bytes=len(header),
                header_sha256=hashlib.sha256(header).hexdigest(),
                tensor_bytes=_nbytes(part),
            )
        )
    return tuple(files)


def canonical_order(tensors: Iterable[TensorInfo]) -> list[Group]:
    """Groups in canonical order: by the power of two in their size, then by name.

    The larger powers come first, so every tensor starts at a multiple of its item size and whole
    pages start at page boundaries, in a format that allows no padding.
    """
    return sorted(_groups(tensors), key=_group_key)


def _group_key(group: Group) -> tuple[object, ...]:
    size = _nbytes(group)
    power = size & -size
    return (size != 0, -power, natural_key(group[0].name))


def _groups(tensors: Iterable[TensorInfo]) -> list[Group]:
    """Runs of per-expert tensors, and every other tensor by itself."""
    runs: dict[tuple[str, bool, str], dict[tuple[int, str], TensorInfo]] = {}
    groups: list[Group] = []
    for tensor in tensors:
        name = parse_expert(tensor.name)
        if name is None:
            groups.append((tensor,))
        else:
            run = runs.setdefault((name.module, name.proj == "down", name.suffix), {})
            run[(name.expert, name.proj)] = tensor
    for (_, down, _), run in runs.items():
        projections = ("down",) if down else ("gate", "up")
        experts = {expert for expert, _ in run}
        order = [(e, proj) for e in range(len(experts)) for proj in projections]
        members = tuple(run[key] for key in order if key in run)
        complete = len(members) == len(order) == len(run)
        if complete and len({(t.dtype, t.shape, t.nbytes) for t in members}) == 1:
            groups.append(members)
        else:
            groups += [(tensor,) for tensor in run.values()]
    return groups


def _nbytes(tensors: Sequence[TensorInfo]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
