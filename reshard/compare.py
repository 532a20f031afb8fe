"""A set against the checkpoint that it was made from: every tensor, byte for byte."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Event

from reshard.bundle import BundleSet
from reshard.checkpoint import Checkpoint
from reshard.copy import tensor_ranges
from reshard.errors import quoted
from reshard.header import TensorInfo
from reshard.manifest import Manifest
from reshard.names import Component
from reshard.progress import Progress
from reshard.report import Problem, WeightFile
from reshard.source import Source
from reshard.tasks import in_parallel, watched


def check_source(
    bundle: BundleSet,
    weights: list[WeightFile],
    source: Checkpoint,
    jobs: int,
    progress: Progress,
) -> list[Problem]:
    """Every tensor of the present stages against the original: name, dtype, shape and bytes."""
    problems = []
    present = {file.record.component for file in weights}
    original = {
        tensor.name: tensor
        for component, tensors in source.components.items()
        for tensor in tensors
        if component in present
    }
    excluded = {e.name for e in bundle.manifest.excluded if e.kind == "component"}
    owned = {c for c in source.components if _owned(c, bundle.manifest)}
    recorded = {file.component for file in bundle.manifest.files().values()}
    for component in sorted(owned - recorded, key=str):
        if component.kind not in excluded:
            problems.append(Problem(".", f"{component.stem}: in the source, not in the set"))
    found = {tensor.name for file in weights for tensor in file.header.tensors}
    for name in sorted(original.keys() - found):
        problems.append(Problem(".", f"{quoted(name)} of the source is missing"))
    progress.start("compare", sum(file.record.tensor_bytes for file in weights))

    def compare(file: WeightFile, stop: Event) -> list[Problem]:
        return _compare(bundle.source, file, source, original, stop, progress)

    for differences in in_parallel(compare, weights, jobs):
        problems += differences
    return problems


def _owned(component: Component, manifest: Manifest) -> bool:
    """Whether a present stage of the set should hold a component of the source."""
    if component.layer_id is None:
        return len(manifest.present) == manifest.pp_size
    stages = (manifest.stages[stage] for stage in manifest.present)
    return any(s.start_layer <= component.layer_id < s.end_layer for s in stages)


def _compare(
    mine: Source,
    file: WeightFile,
    source: Checkpoint,
    original: Mapping[str, TensorInfo],
    stop: Event,
    progress: Progress,
) -> list[Problem]:
    problems = []
    pairs = []
    for tensor in file.header.tensors:
        other = original.get(tensor.name)
        if other is None:
            problems.append(Problem(file.path, f"{quoted(tensor.name)} is not in the source"))
        elif (tensor.dtype, tensor.shape, tensor.nbytes) != (
            other.dtype,
            other.shape,
            other.nbytes,
        ):
            problems.append(Problem(file.path, f"{quoted(tensor.name)}: dtype or shape differ"))
        else:
            pairs.append((tensor, other))
    # In the order of the source, which may have to send it.
    pairs.sort(key=lambda pair: (pair[1].file, pair[1].begin))
    ends = list(accumulate(tensor.nbytes for tensor, _ in pairs))
    ours = mine.read_many(tensor_ranges(tensor for tensor, _ in pairs))
    theirs = source.source.read_many(tensor_ranges(other for _, other in pairs), stop)
    different: set[int] = set()
    position = 0
    for a, b in zip(watched(ours, stop, progress), theirs, strict=True):
        if a != b:
            different.update(_tensors_that_differ(a, b, position, ends))
        position += len(a)
    for number in sorted(different):
        name = quoted(pairs[number][0].name)
        problems.append(Problem(file.path, f"{name}: bytes differ"))
    return problems


def _tensors_that_differ(
    a: memoryview, b: memoryview, position: int, ends: Sequence[int]
) -> Iterator[int]:
    """Which tensors, by number, have other bytes in `a` than in `b`.

    `position`: where these bytes begin in the row of all tensors, of which `ends` are the ends.
    """
    begin = 0
    number = bisect_right(ends, position)
    while begin < len(a):
        end = min(len(a), ends[number] - position)
        if a[begin:end] != b[begin:end]:
            yield number
        begin, number = end, number + 1
