"""Taking stages out of a set: an ordinary model directory with exactly those stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reshard.bundle import PARTIAL_NAME, BundleSet
from reshard.copy import bundle_task, run_tasks
from reshard.errors import BundleError, OutputError, UsageError, quoted
from reshard.finish import Outcome, finish_directory, index_of, side_bytes
from reshard.manifest import MANIFEST_NAME, FileRecord, Manifest
from reshard.output import OutputDirectory, check_apart, check_usable
from reshard.progress import Progress, Silent
from reshard.source import LocalSource


def pull(
    out: BundleSet | str | Path,
    dest: str | Path,
    stages: Sequence[int],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Make `dest` a flat model directory with the given stages of the set `out`.

    out: an opened set, a directory, or, as text, `org/name[@revision]` on the Hub. Stages of the
    same set that are in `dest` already stay. jobs: files at a time, or requests to the Hub.

    Local files are linked where the file system allows it, else copied and checked against the
    manifest; files of the Hub are fetched, and checked as they arrive. A run that was killed is
    continued by the next. Raises `HubError`, and `BundleError` where the set lacks a stage or a file, or a file is not what the
    manifest says; `UsageError` and `OutputError` where `dest` cannot be used; `StorageError`.
    """
    bundle = out if isinstance(out, BundleSet) else BundleSet.open(out)
    root = Path(dest)
    if isinstance(bundle.source, LocalSource):
        check_apart(root, bundle.source.root)
    check_usable(root)
    bundle.check_side_files()
    if not stages:
        raise UsageError("no stages are given")
    absent = sorted(set(stages) - set(bundle.manifest.present))
    if absent:
        raise BundleError(
            f"stages {', '.join(map(str, absent))} are not in {bundle.source.name}; "
            f"it has {', '.join(map(str, bundle.manifest.present))}",
            hint="they were not split yet: reshard split ... --stage K"
            if isinstance(bundle.source, LocalSource)
            else "they were not pushed yet: reshard push OUT REPO --stage K",
        )
    there = _pulled_set(root, bundle.manifest)
    untouched = not (root / PARTIAL_NAME).exists()
    held = set(there.manifest.present) if there else set()
    whole = untouched and set(stages) <= held and not _missing(there, stages, bundle)
    if there and whole and there.complete(""):
        return Outcome(root, there.manifest)
    begun_as = {"command": "pull", "set": bundle.manifest.set_id}
    with OutputDirectory.hold(root, begun_as, begun_from=bundle.source.name) as output:
        there = _pulled_set(root, bundle.manifest)  # as it is now that nobody else writes it
        if there is None:
            output.require_fresh()
        claimed = tuple(sorted({*stages, *(there.manifest.present if there else ())}))
        missing = _missing(there, stages, bundle)
        lacking = sorted(missing - bundle.manifest.files().keys())
        if lacking:
            raise BundleError(
                f"{quoted(str(root))} lacks {lacking[0]} of a stage that it holds, and "
                f"{bundle.source.name} does not have it either",
                hint="pull that stage again from a set that has it, or use another directory",
            )
        tasks = [
            replace(bundle_task(bundle, file.name, file.name), stage=stage)
            for file, stage in _with_stages(bundle.manifest, claimed)
            if file.name in missing
        ]
        done = run_tasks(
            tasks,
            source=bundle.source,
            output=output,
            jobs=jobs,
            checksums=False,
            progress=progress or Silent(),
            label="pull",
            more_bytes=side_bytes(bundle.manifest),
        )
        sha256 = {f.name: f.sha256 for f in there.manifest.files().values()} if there else {}
        sha256 |= {task.name: task.sha256 for task in done}
        seen = bundle.manifest.seen_from(claimed, sha256, root=False)
        index = index_of(LocalSource(root), seen.files())
        finish_directory(output, "", bundle.source, seen, *index)
    return Outcome.of(root, seen, done)


def _missing(there: BundleSet | None, stages: Sequence[int], bundle: BundleSet) -> set[str]:
    """The files that have to come: of the stages asked for, and of those that `there` claims.

    Only files that `there` claims can be in place already; others of their names mean nothing.
    """
    claimed = there.manifest.files() if there else {}
    names = {file.name for stage in stages for file in bundle.manifest.stages[stage].files}
    return {
        name
        for name in names | claimed.keys()
        if there is None
        or name not in claimed
        or not there.in_place("", {name: claimed[name].bytes})
    }


def _with_stages(manifest: Manifest, stages: Sequence[int]) -> list[tuple[FileRecord, int]]:
    """The files of `stages`, each once, with the first of these that has it."""
    first: dict[str, tuple[FileRecord, int]] = {}
    for stage in stages:
        for file in manifest.stages[stage].files:
            first.setdefault(file.name, (file, stage))
    return list(first.values())


def _pulled_set(root: Path, manifest: Manifest) -> BundleSet | None:
    """The stages that are there already; refused unless they are flat and of this set."""
    if not (root / MANIFEST_NAME).exists():
        return None
    there = BundleSet.open(root)
    flat = all(there.directory_of(stage) == "" for stage in there.manifest.present)
    if there.manifest.local is not None or not flat:
        raise OutputError(
            f"{quoted(str(root))} is the root of a set, not a directory of pulled stages",
            hint="choose another directory",
        )
    differences = there.manifest.differences(manifest)
    if differences:
        raise OutputError(
            f"{quoted(str(root))} holds stages of another set; it differs in "
            f"{', '.join(differences)}",
            hint="choose another directory",
        )
    return there
