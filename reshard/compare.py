"""A set against the checkpoint that it was made from: every tensor, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event

from reshard.bundle import BundleSet
from reshard.checkpoint import Checkpoint
from reshard.copy import in_parallel, tensor_ranges, watched
from reshard.errors import quoted
from reshard.header import TensorInfo
from reshard.manifest import Manifest
from reshard.names import Component
from reshard.progress import Progress
from reshard.report import Problem, WeightFile
from reshard.source import LocalSource, sha256_of


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
    mine: LocalSource,
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
    ours = mine.read_many(tensor_ranges(tensor for tensor, _ in pairs))
    theirs = source.source.read_many(tensor_ranges(other for _, other in pairs))
    equal = True
    for a, b in zip(watched(ours, stop, progress), theirs, strict=True):
        equal = equal and bytes(a) == bytes(b)
    if not equal:
        for tensor, other in pairs:
            here = sha256_of(mine.read_many(tensor_ranges([tensor])))
            if here != sha256_of(source.source.read_many(tensor_ranges([other]))):
                problems.append(Problem(file.path, f"{quoted(tensor.name)}: bytes differ"))
    return problems
