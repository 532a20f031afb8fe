"""Acting on a plan: the stages of a set appear on disk, the manifest last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reshard.bundle import PARTIAL_NAME, BundleSet, stage_directory
from reshard.canonical import FilePlan
from reshard.card import CARD_NAME, MAX_CARD, read_license
from reshard.copy import bundle_task, run_tasks
from reshard.errors import OutputError, quoted
from reshard.finish import Outcome, finish_directory, side_bytes
from reshard.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    EngineFacts,
    LicenseFacts,
    Manifest,
    PartitionFacts,
    SideFile,
    SourceFacts,
)
from reshard.output import OutputDirectory, check_apart, check_usable
from reshard.plan import ReshardPlan
from reshard.progress import Progress, Silent
from reshard.source import LocalSource, Range, Source, sha256_of
from reshard.tasks import FileTask
from reshard.version import __version__


def split(
    plan: ReshardPlan,
    out: str | Path,
    *,
    stages: Sequence[int] | None = None,
    jobs: int | None = None,
    checksums: bool = True,
    progress: Progress | None = None,
) -> Outcome:
    """Write the bundles of a plan into the directory `out`: all stages, or `stages` only.

    A run that was killed is continued; a stage is added to what is there; a finished set is left
    as it is. jobs: files written at a time (default: the cores, at most 8). checksums: record the
    sha256 of every file.

    Raises `UsageError` and `OutputError` where `out` cannot be used, `SourceChangedError` where the
    source is not what was planned, `StorageError` where reading or writing fails. Then there is no
    manifest, no half file under a final name, and the same call continues the work.
    """
    root = Path(out)
    source = plan.checkpoint.source
    if isinstance(source, LocalSource):
        check_apart(root, source.root)
    check_usable(root)
    manifest = plan_manifest(plan)
    asked = set(range(plan.pp_size) if stages is None else stages)
    current = _finished_set(root, manifest)
    if current and not (root / PARTIAL_NAME).exists() and _is_complete(current, asked):
        return Outcome(root, current.manifest)
    with OutputDirectory.hold(root, _begun_as(plan, manifest), begun_from=source.name) as output:
        current = _finished_set(root, manifest)  # as it is now that nobody else writes it
        if current is None:
            output.require_fresh()
        claimed = asked | set(current.manifest.present if current else ())
        wanted = sorted(claimed - set(current.intact_stages() if current else ()))
        for stage in wanted:
            output.make_directory(stage_directory(stage, plan.pp_size))
        run = partial(
            run_tasks,
            source=source,
            output=output,
            jobs=jobs,
            checksums=checksums,
            progress=progress or Silent(),
            more_bytes=side_bytes(manifest, len(wanted) + 1),
        )
        new, replicas = _tasks(plan, wanted, root, current)
        done = run(new, label="split")
        sha256 = {f.name: f.sha256 for f in current.manifest.files().values()} if current else {}
        sha256 |= {task.name: task.sha256 for task in done}
        done += run([replace(t, sha256=sha256.get(t.name)) for t in replicas], label="replicas")
        sha256 |= {task.name: task.sha256 for task in done}
        for stage in wanted:
            directory = stage_directory(stage, plan.pp_size)
            paths = {file.name: file.name for file in plan.stages[stage].files}
            seen = manifest.seen_from((stage,), sha256, root=False)
            finish_directory(output, directory, source, seen, *_index(plan, paths))
        present = tuple(sorted(claimed))
        for stage in present:
            sizes = {file.name: file.size for file in plan.stages[stage].files}
            output.require_in_place(stage_directory(stage, plan.pp_size), sizes)
        seen = manifest.seen_from(present, sha256, root=True)
        finish_directory(output, "", source, seen, *_index(plan, _root_paths(plan, present)))
    return Outcome.of(root, seen, done)


def plan_manifest(plan: ReshardPlan) -> Manifest:
    """The manifest of the whole set that a plan describes, no checksum known yet.

    Reads the side files, and a sample of every weight file for the fingerprint.
    """
    checkpoint = plan.checkpoint
    if checkpoint.bundle is not None:
        source = checkpoint.bundle.manifest.source
    else:
        origin = checkpoint.source.origin
        source = SourceFacts(
            directory=origin.get("directory"),
            repo=origin.get("repo"),
            commit=origin.get("commit"),
            fingerprint=checkpoint.fingerprint(),
            license=_license(checkpoint.source),
        )
    stamps = {h.file: checkpoint.source.stamp(h.file) for h in checkpoint.headers}
    if (
        "commit" in checkpoint.source.origin
    ):  # which cannot change, so only a cache has its own times
        stamps = {file: stamp._replace(mtime_ns=0) for file, stamp in stamps.items()}
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        present=tuple(range(plan.pp_size)),
        source=source,
        model=plan.model_facts(),
        engine=EngineFacts(plan.engine.name, plan.engine.version),
        partition=PartitionFacts(plan.partition.rule, plan.partition.counts),
        stages=tuple(stage.record() for stage in plan.stages),
        excluded=plan.excluded,
        side_files=tuple(_side_file(checkpoint.source, name) for name in checkpoint.side_files),
        local={file: (s.size, max(0, s.mtime_ns)) for file, s in sorted(stamps.items())},
    )


def _finished_set(root: Path, manifest: Manifest) -> BundleSet | None:
    """The finished set at `root`, if there is one; refused unless it is of this plan and source."""
    if not (root / MANIFEST_NAME).exists():
        return None
    bundle = BundleSet.open(root)
    current = bundle.manifest
    where = quoted(str(root))
    if current.local is None:
        raise OutputError(
            f"{where} was not made by reshard split: it was pulled, or is one stage of a set",
            hint="choose another output directory",
        )
    differences = current.differences(manifest)
    if differences:
        hint = "choose another output directory"
        origin = current.source
        if "source" in differences and origin.repo and origin.commit != manifest.source.commit:
            hint += f", or add to this one from SOURCE {origin.repo}@{origin.commit}"
        raise OutputError(
            f"{where} holds another set; it differs in {', '.join(differences)}", hint=hint
        )
    if current.local != manifest.local:
        raise OutputError(
            f"the files of the source are not those that {where} was made from: other sizes or times",
            hint=f"reshard verify {where} --source ... compares the bytes; if they are equal, split "
            "missing stages into another directory, and pull from both",
        )
    return bundle


def _is_complete(current: BundleSet, asked: set[int]) -> bool:
    """Whether all that was asked for, and all that the set claims, is there in its size."""
    present = set(current.manifest.present)
    return asked <= present == set(current.intact_stages()) and current.complete("")


def _begun_as(plan: ReshardPlan, manifest: Manifest) -> dict[str, Any]:
    """What a run must share with the one whose work it continues."""
    source = plan.checkpoint.source
    state: dict[str, Any]
    if "commit" in source.origin:  # then nothing changes but whether a cache has it
        state = {"commit": source.origin["commit"]}
    else:
        headers = plan.checkpoint.headers
        state = {f"state of {h.file}": list(source.stamp(h.file)) for h in headers}
    return {
        "command": "split",
        "engine": plan.engine.name,
        "partition": list(plan.partition.counts),
        "exclusions": [exclusion.name for exclusion in plan.excluded],
        "replicas": [list(stage.replicas) for stage in plan.stages],
        "source": manifest.source.fingerprint,
        **state,
        "set": manifest.set_id,
    }


def _tasks(
    plan: ReshardPlan, wanted: Sequence[int], root: Path, current: BundleSet | None
) -> tuple[list[FileTask], list[FileTask]]:
    """The files that the wanted stages lack: those to make, and those to link to what is there."""
    new, replicas = [], []

    def path(stage: int, file: FilePlan) -> str:
        return f"{stage_directory(stage, plan.pp_size)}/{file.name}"

    def in_place(stage: int, file: FilePlan) -> bool:
        if current is None or stage not in current.manifest.present:
            return False
        return current.in_place(stage_directory(stage, plan.pp_size), {file.name: file.size})

    for file in plan.files().values():
        holders = [stage.stage for stage in plan.stages if file in stage.files]
        there = [stage for stage in holders if in_place(stage, file)]
        targets = [stage for stage in holders if stage in wanted and stage not in there]
        if targets and not there:
            there = [targets.pop(0)]
            task = _new_task(plan, path(there[0], file), file)
            new.append(replace(task, stage=there[0]))
        for stage in targets:
            twin = root / path(there[0], file)
            replicas.append(FileTask(path(stage, file), file.size, same_as=twin))
    return new, replicas


def _new_task(plan: ReshardPlan, path: str, file: FilePlan) -> FileTask:
    """A file made of its tensors, or taken whole from a source set that has the very same one."""
    bundle = plan.checkpoint.bundle
    if bundle is not None:
        record = bundle.manifest.files().get(file.name)
        if record is not None and record.header_sha256 == file.header_sha256:
            return bundle_task(bundle, file.name, path)
    return FileTask(path, file.size, tensors=file.tensors)


def _root_paths(plan: ReshardPlan, present: Sequence[int]) -> dict[str, str]:
    """File -> its path from the root of the set, in the lowest present stage that has it."""
    paths: dict[str, str] = {}
    for stage in present:
        for file in plan.stages[stage].files:
            paths.setdefault(file.name, f"{stage_directory(stage, plan.pp_size)}/{file.name}")
    return paths


def _index(plan: ReshardPlan, paths: dict[str, str]) -> tuple[dict[str, str], int]:
    """The weight map of an index that names the files `paths`, and its total size."""
    files = [(file, paths[file.name]) for file in plan.files().values() if file.name in paths]
    weight_map = {tensor.name: path for file, path in files for tensor in file.tensors}
    return weight_map, sum(file.tensor_bytes for file, _ in files)


def _license(source: Source) -> LicenseFacts | None:
    """What the model card of a source, which does not go along, says of the license."""
    if CARD_NAME not in source.files():
        return None
    size = min(source.stamp(CARD_NAME).size, MAX_CARD)
    return read_license(source.read(CARD_NAME, 0, size).decode("utf-8", "replace"))


def _side_file(source: Source, name: str) -> SideFile:
    size = source.stamp(name).size
    return SideFile(name, size, sha256_of(source.read_many([Range(name, 0, size)])))
