"""Proving that a set is whole: structure, sizes, hashes; against its source; for an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from threading import Event

from reshard.bundle import BundleSet, prefix_of, stage_directory
from reshard.checkpoint import Checkpoint, open_checkpoint, read_config
from reshard.compare import check_source
from reshard.errors import (
    BundleError,
    CheckpointError,
    PlanError,
    ReshardError,
    quoted,
    storage_errors,
)
from reshard.header import SafetensorsHeader
from reshard.index import INDEX_NAME, parse_index
from reshard.manifest import MANIFEST_NAME, Manifest, SideFile
from reshard.names import component_of
from reshard.output import TEMPORARY, locked, remove_temporaries, replace_file
from reshard.placement import minimum_first_layers, place
from reshard.progress import Progress, Silent
from reshard.report import Problem, Report, WeightFile
from reshard.source import STAGE_DIRECTORY, LocalSource, Range, sha256_of
from reshard.tasks import default_jobs, in_parallel, watched
from reshard.units import counted


def verify(
    path: str | Path,
    *,
    source: Checkpoint | str | Path | None = None,
    engine: str | None = None,
    write_checksums: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a set of bundles, a stage directory or a directory of pulled stages.

    Always: the manifest, every file's size, header and sha256, indexes, side files, stray weights.
    source: every tensor's bytes against this checkpoint. engine: does the placement serve it.
    write_checksums: record the sha256 of files that have none, if there is no problem.

    Problems are collected in the report. Raises `BundleError` where there is no readable manifest,
    `UsageError` for an unknown engine, `OutputError` where another run writes the set.
    """
    root = Path(path)
    bundle = BundleSet.open(root)
    original = open_checkpoint(source) if isinstance(source, (str, Path)) else source
    if original is not None and original.bundle is not None:
        original.bundle.require_all_stages("a comparison with it")
    with locked(root) if write_checksums else nullcontext():
        if write_checksums:
            remove_temporaries(root)
            bundle = BundleSet.open(root)  # as it is now that nobody else writes it
        problems, sha256 = _examine(
            bundle,
            original,
            engine,
            write_checksums,
            jobs or default_jobs(),
            progress or Silent(),
        )
        manifest = bundle.manifest
        if write_checksums and not problems:
            manifest = _write_checksums(bundle, sha256)
    files = manifest.files().values()
    return Report(
        stages=len(manifest.present),
        files=len(files),
        tensors=sum(file.tensors for file in files),
        bytes=sum(file.tensor_bytes for file in files),
        unhashed=sum(file.sha256 is None for file in files),
        problems=tuple(problems),
    )


def prove_stages(
    bundle: BundleSet,
    stages: Collection[int],
    *,
    jobs: int | None,
    progress: Progress,
    before_hashing: Callable[[], None],
) -> tuple[dict[str, str], list[WeightFile]]:
    """sha256 of every weight file of `stages`, by name, and the files, proved to be whole.

    `before_hashing` is called when all but the hashes is found to be right. Raises `BundleError`
    where anything is wrong with them.
    """
    parts = [bundle]
    directories = {stage: bundle.directory_of(stage) for stage in stages}
    if set(stages) != set(bundle.manifest.present) and all(directories.values()):
        parts = [BundleSet.open(bundle.root / directory) for directory in directories.values()]
    examined = [(part, *_examine_structure(part, None)) for part in parts]
    _require_whole(bundle, [problem for _, _, problems in examined for problem in problems])
    before_hashing()
    sha256: dict[str, str] = {}
    for part, weights, problems in examined:
        sha256 |= _check_hashes(part, weights, problems, jobs or default_jobs(), progress)
    _require_whole(bundle, [problem for _, _, problems in examined for problem in problems])
    return sha256, [file for _, weights, _ in examined for file in weights]


def _require_whole(bundle: BundleSet, problems: list[Problem]) -> None:
    if problems:
        first = problems[0]
        raise BundleError(
            f"{bundle.source.name} is not whole: {quoted(first.file)}: {first.problem} "
            f"(of {counted(len(problems), 'problem')})",
            hint=f"see reshard verify {bundle.source.name}; to repair it, remove what is damaged, "
            "then run the reshard split or pull that made it again",
        )


def _examine(
    bundle: BundleSet,
    source: Checkpoint | None,
    engine: str | None,
    hash_all: bool,
    jobs: int,
    progress: Progress,
) -> tuple[list[Problem], dict[str, str]]:
    """What is wrong with a set, and the sha256 of its files: of all, or of those that record one."""
    weights, problems = _examine_structure(bundle, engine)
    to_hash = [file for file in weights if hash_all or file.record.sha256 is not None]
    sha256 = _check_hashes(bundle, to_hash, problems, jobs, progress)
    if source is not None:
        problems += check_source(bundle, weights, source, jobs, progress)
    return problems, sha256


def _examine_structure(
    bundle: BundleSet, engine: str | None
) -> tuple[list[WeightFile], list[Problem]]:
    """The weight files whose headers are proved, and what is wrong apart from the data."""
    problems: list[Problem] = []
    weights = _check_files(bundle, problems)
    for directory in _directories(bundle):
        problems += _check_directory(bundle, directory, weights)
    problems += _check_tensors(bundle, weights)
    if engine is not None:
        problems += _check_engine(bundle, engine)
    return weights, problems


def _check_files(bundle: BundleSet, problems: list[Problem]) -> list[WeightFile]:
    """Every weight file of every present stage whose size and header are proved."""
    weights: list[WeightFile] = []
    for stage in bundle.manifest.present:
        directory = stage_directory(stage, bundle.manifest.pp_size)
        if bundle.manifest.local is not None and bundle.directory_of(stage) != directory:
            problems.append(Problem(directory, "is missing"))
            continue
        for record in bundle.manifest.stages[stage].files:
            path = bundle.path_of(stage, record.name)
            if any(path == file.path for file in weights):
                continue  # stages that share a directory share their replicas
            try:
                header = bundle.header(path, record)
            except ReshardError as error:
                problems.append(Problem.of(path, error))
                continue
            nbytes = sum(tensor.nbytes for tensor in header.tensors)
            if (len(header.tensors), nbytes) != (record.tensors, record.tensor_bytes):
                problems.append(Problem(path, "the manifest counts its tensors wrongly"))
            weights.append(WeightFile(path, record, header))
    return weights


def _directories(bundle: BundleSet) -> list[str]:
    """The directories of a set, as prefixes of paths: `` and one for each stage with its own."""
    own = {bundle.directory_of(stage) for stage in bundle.manifest.present}
    return sorted({"", *own})


def _check_directory(
    bundle: BundleSet, directory: str, weights: list[WeightFile]
) -> Iterator[Problem]:
    """Index, side files, manifest, and what does not belong: of the set or of one stage in it."""
    prefix = prefix_of(directory)
    if directory and (bundle.root / directory).is_symlink():
        yield Problem(directory, "is a link; reshard makes directories")
    here = LocalSource(bundle.root / directory)
    manifest = bundle.manifest
    stages = [s for s in manifest.present if directory in ("", bundle.directory_of(s))]
    paths: dict[str, str] = {}
    for stage in stages:
        for file in manifest.stages[stage].files:
            paths.setdefault(file.name, bundle.path_of(stage, file.name).removeprefix(prefix))
    headers = {file.path.removeprefix(prefix): file.header for file in weights}
    if all(path in headers for path in paths.values()):
        yield from _check_index(here, prefix, {p: headers[p] for p in paths.values()})
    for side in manifest.side_files:
        yield from _check_side_file(here, prefix, side)
    if directory:
        yield from _check_stage_manifest(here, prefix, manifest, stages)
    for name in here.files():
        if name.endswith(".safetensors") and name not in paths.values():
            yield Problem(prefix + name, "is not part of the set, but engines may load it")
        if name.startswith(TEMPORARY):
            yield Problem(prefix + name, "is being written, or was left by a run that was killed")
    for name in here.directories() if not directory else ():
        if STAGE_DIRECTORY.fullmatch(name) and name not in _directories(bundle):
            yield Problem(name, "is not part of the set: an unfinished run, or another partition")


def _check_index(
    here: LocalSource, prefix: str, headers: Mapping[str, SafetensorsHeader]
) -> Iterator[Problem]:
    path = prefix + INDEX_NAME
    try:
        raw = here.read(INDEX_NAME, 0, here.stamp(INDEX_NAME).size)
        index = parse_index(raw, path, in_set=True)
    except ReshardError as error:
        yield Problem.of(path, error)
        return
    expected = {t.name: file for file, header in headers.items() for t in header.tensors}
    total = sum(t.nbytes for header in headers.values() for t in header.tensors)
    wrong = expected.items() ^ index.weight_map.items()
    if wrong:
        name = quoted(min(wrong)[0])
        yield Problem(path, f"does not match the files here: {name} ({len(wrong)} differences)")
    if index.total_size != total:
        yield Problem(path, f"total_size is {quoted(repr(index.total_size))}, not {total}")


def _check_side_file(here: LocalSource, prefix: str, side: SideFile) -> Iterator[Problem]:
    try:
        size = here.stamp(side.name).size
        if size != side.bytes:
            yield Problem(prefix + side.name, f"has {size:,} bytes, not {side.bytes:,}")
        elif sha256_of(here.read_many([Range(side.name, 0, size)])) != side.sha256:
            yield Problem(prefix + side.name, "was changed: its sha256 is not the manifest's")
    except ReshardError as error:
        yield Problem.of(prefix + side.name, error)


def _check_stage_manifest(
    here: LocalSource, prefix: str, manifest: Manifest, stages: list[int]
) -> Iterator[Problem]:
    path = prefix + MANIFEST_NAME
    try:
        own = BundleSet.open(here.root).manifest
    except ReshardError as error:
        yield Problem.of(path, error)
        return
    if own.set_id != manifest.set_id:
        yield Problem(path, f"is of another set: differs in {', '.join(own.differences(manifest))}")
    elif list(own.present) != stages:
        yield Problem(path, f"says that stages {list(own.present)} are here, not {stages}")


def _check_tensors(bundle: BundleSet, weights: list[WeightFile]) -> Iterator[Problem]:
    """Every tensor in the file of its component, in one file only, and none missing."""
    try:
        config = read_config(bundle.source)
    except ReshardError as error:
        yield Problem.of("config.json", error)
        return
    owner: dict[str, str] = {}
    for file in weights:
        for tensor in file.header.tensors:
            if component_of(tensor.name, config) != file.record.component:
                yield Problem(file.path, f"holds {quoted(tensor.name)}, which belongs elsewhere")
            if owner.setdefault(tensor.name, file.record.name) != file.record.name:
                yield Problem(file.path, f"holds {quoted(tensor.name)} a second time")
    manifest = bundle.manifest
    whole = len(manifest.present) == manifest.pp_size
    proved = {file.record.name for file in weights} == manifest.files().keys()
    if whole and proved and len(owner) != manifest.model.tensors:
        yield Problem(".", f"{manifest.model.tensors:,} tensors expected, {len(owner):,} found")


def _check_engine(bundle: BundleSet, engine: str) -> Iterator[Problem]:
    """What the engine needs on a stage and the set does not have there."""
    manifest = bundle.manifest
    kinds = [{f.component.kind for f in stage.files} for stage in manifest.stages]
    try:
        config = read_config(bundle.source)
        placement = place(config, set().union(*kinds) - {"layer"}, engine, manifest.pp_size)
    except (CheckpointError, PlanError) as error:
        yield Problem.of(".", error)
        return
    version = f"{placement.engine.name} {placement.engine.version}"
    for kind, stages in placement.stages.items():
        lacking = [stage for stage in sorted(stages) if kind not in kinds[stage]]
        if lacking:
            numbers = ", ".join(map(str, lacking))
            yield Problem(".", f"{version} needs {kind} on stages {numbers}, which lack it")
    minimum = minimum_first_layers(config, manifest.pp_size)
    if manifest.stages[0].end_layer < minimum:
        yield Problem(".", f"stage 0 must own the first {minimum} layers (deepstack)")


def _check_hashes(
    bundle: BundleSet,
    weights: list[WeightFile],
    problems: list[Problem],
    jobs: int,
    progress: Progress,
) -> dict[str, str]:
    """sha256 of the weight files, by name; hard links to one file are read once."""
    source = bundle.source
    records = {file.path: file.record for file in weights}
    twins: dict[tuple[int, int], list[str]] = {}
    for path in records:
        with storage_errors(bundle.root / path):
            status = os.stat(bundle.root / path)
        twins.setdefault((status.st_dev, status.st_ino), []).append(path)
    progress.start("verify", sum(records[same[0]].bytes for same in twins.values()))

    def hash_twins(same: list[str], stop: Event) -> tuple[list[str], str]:
        whole = Range(same[0], 0, records[same[0]].bytes)
        sha256 = sha256_of(watched(source.read_many([whole]), stop, progress))
        progress.finish_file(same[0], "checked")
        return same, sha256

    found: dict[str, str] = {}
    for same, sha256 in in_parallel(hash_twins, twins.values(), jobs):
        for path in same:
            expected = records[path].sha256 or found.get(records[path].name, sha256)
            if sha256 != expected:
                problems.append(Problem(path, f"sha256 is {sha256}, expected {expected}"))
            found[records[path].name] = sha256
    return found


def _write_checksums(bundle: BundleSet, sha256: Mapping[str, str]) -> Manifest:
    """Record checksums in the manifests of the set and of its stages; the root's one last."""
    for directory in reversed(_directories(bundle)):
        root = bundle.root / directory
        own = BundleSet.open(root).manifest
        own = own.seen_from(own.present, sha256, root=own.local is not None)
        replace_file(root / MANIFEST_NAME, own.to_bytes())
    return own
