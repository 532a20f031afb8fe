"""Publishing a set of bundles: one commit on the Hub that holds it whole, or no change at all."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.bundle import BundleSet
from reshard.errors import (
    BundleError,
    HubConflictError,
    HubError,
    SourceChangedError,
    UsageError,
    listed,
    quoted,
)
from reshard.hub_source import load_hub
from reshard.manifest import Manifest
from reshard.patience import Patience
from reshard.progress import Progress, Silent
from reshard.publication import (
    Change,
    Content,
    Held,
    LocalStages,
    add_card,
    paths_of,
    plan_change,
    wanted_files,
)
from reshard.reference import DEFAULT_BRANCH, HubReference
from reshard.units import size
from reshard.verify import prove_stages
from reshard.version import __version__

if TYPE_CHECKING:
    from reshard.hub import Draft, Repository

MAX_FILE = 47_000_000_000
"""Bytes of a file that the Hub takes for certain: 50 GB is what plain downloads allow, and files a
little below it have been refused."""

MAX_FILES = 25_000
"""Large files of one commit (`HfApi.create_commit`)."""

MAX_ENTRIES = 10_000
"""Files of one directory that the Hub advises."""

_ATTEMPTS = 10

_BATCH_BYTES = 8_000_000_000
_BATCH_FILES = 50


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did. `manifest` is the set as the repository holds it at `commit`.

    `added`, `copied` and `deleted` count files: sent unless the Hub had their content, given the
    content of another file of the repository, and removed. `changed` is false where the repository
    held all of it already.
    """

    reference: HubReference
    commit: str
    pull_request: str | None
    manifest: Manifest
    added: int
    added_bytes: int
    copied: int
    deleted: int
    changed: bool
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        made: Repository,
        pull_request: str | None,
        manifest: Manifest,
        change: Change,
        notes: tuple[str, ...],
    ) -> Pushed:
        return cls(
            made.reference,
            made.commit,
            pull_request,
            manifest,
            added=len(change.adds),
            added_bytes=sum(content.size for content in change.adds.values()),
            copied=len(change.copies),
            deleted=len(change.deletes),
            changed=bool(change),
            notes=notes,
        )


def push(
    out: BundleSet | str | Path,
    repo: str,
    *,
    stages: Collection[int] | None = None,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Publish the set `out`, or some of its stages, in the repository `repo` (`org/name`).

    The set is proved whole first; of the Hub, only what it holds is looked at before that. All
    changes are one commit, on top of the revision as it was read; then the Hub's sizes and
    checksums are compared with the manifest. What the Hub has already is not sent again, so a run
    that was killed is continued by the next.

    stages: add these to the same set in the repository; without, the present ones, which replace
    another set if they are all. private: if the repository has to be created. revision: a branch, created empty if need be.
    create_pr: open a pull request instead of moving the branch. jobs: files hashed at a time.

    Raises `BundleError` where the set is not whole, `HubError` where the repository holds other
    weights or another set, or the Hub refuses; `UsageError`.
    """
    reference = _reference(repo, revision)
    bundle = out if isinstance(out, BundleSet) else BundleSet.open(Path(out))
    wanted = tuple(sorted(set(bundle.manifest.present if stages is None else stages)))
    if not wanted:
        raise UsageError("no stages are given")
    absent = sorted(set(wanted) - set(bundle.manifest.present))
    if absent:
        raise BundleError(
            f"stages {', '.join(map(str, absent))} are not in {bundle.source.name}",
            hint="split these stages first: reshard split ... --stage K",
        )
    check_limits(bundle.manifest, wanted)
    progress = progress or Silent()

    hub = load_hub()

    def look() -> None:
        """Hashing may take an hour: refuse before what will be refused after it."""
        there = hub.look_before_push(reference)
        if there is not None:
            Held.read(there).require_room(bundle.manifest, wanted, adding_only=stages is not None)

    proof = prove_stages(bundle, wanted, jobs=jobs, progress=progress, before_hashing=look)
    local = LocalStages(bundle, wanted, *proof)
    patience = Patience()
    change: Change | None = None
    for attempt in range(_ATTEMPTS):
        parent = hub.open_for_push(reference, private=private)
        held = Held.read(parent)
        held.require_room(bundle.manifest, wanted, adding_only=stages is not None)
        manifest, files = wanted_files(local, held)
        notes = held.replaced_notes(files) + add_card(files, manifest, reference, held)
        earlier, change = change, plan_change(files, manifest, held)
        if not change:  # so it was made, if an earlier attempt did not hear of it
            return Pushed.of(parent, None, manifest, earlier or change, notes)
        draft = hub.Draft(parent, create_pr=create_pr, patience=patience)
        _send(draft, change, progress)
        try:
            made, pull_request = draft.publish(_title(wanted, manifest))
        except HubConflictError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(random.uniform(0, 1 + attempt))  # others are pushing as well
            continue
        _check_published(made, files, manifest, change)
        return Pushed.of(made, pull_request, manifest, change, notes)
    raise AssertionError("the last attempt returns or raises")


def check_limits(manifest: Manifest, stages: Collection[int]) -> None:
    """Raise `BundleError` where files of a set are larger or more than the Hub takes."""
    records = [file for stage in stages for file in manifest.stages[stage].files]
    for file in records:
        if file.bytes > MAX_FILE:
            raise BundleError(
                f"{file.name}: {size(file.bytes)}, more than the {size(MAX_FILE)} that the Hub takes",
                hint="carry this set to its nodes in another way",
            )
    most = max(len(manifest.stages[stage].files) for stage in stages)
    if len(records) > MAX_FILES or most > MAX_ENTRIES:
        raise BundleError(
            f"{len(records):,} weight files, {most:,} of them in one stage: more than the "
            f"{MAX_FILES:,} of a commit or the {MAX_ENTRIES:,} of a directory that the Hub takes",
            hint="push some stages at a time, with --stage",
        )


def _reference(repo: str, revision: str | None) -> HubReference:
    reference = HubReference.parse(repo)
    if revision is not None:
        if reference.revision not in (None, revision):
            raise UsageError(f"{reference}: --revision {quoted(revision)} names another one")
        reference = HubReference.parse(f"{reference.repo}@{revision}")
    return reference.at(None) if reference.revision == DEFAULT_BRANCH else reference


def _send(draft: Draft, change: Change, progress: Progress) -> None:
    """Hand the files of a change to the draft, which sends them: stage by stage, the root last."""
    for path, twin in change.copies.items():
        draft.copy(path, twin)
    for path in change.deletes:
        draft.delete(path)
    directories: dict[str, dict[str, Content]] = {}
    for path in sorted(change.adds, key=lambda path: ("/" not in path, path)):
        directories.setdefault(path.rpartition("/")[0], {})[path] = change.adds[path]
    for directory, files in directories.items():
        label = f"stage {int(directory.split('-')[1])}" if directory else "index"
        progress.start(label, sum(content.size for content in files.values()))
        for batch in _batches(files):
            sent = draft.add({path: content.data for path, content in batch.items()})
            for path, content in batch.items():
                if sent[path] != content.sha256:
                    raise SourceChangedError(
                        f"{quoted(path)} changed while it was being pushed",
                        hint="wait until nothing writes to the set, then run the command again",
                    )
            progress.advance(sum(content.size for content in batch.values()))
            for path, content in batch.items():
                if path.endswith(".safetensors"):
                    progress.finish_file(path, "added")


def _batches(files: Mapping[str, Content]) -> Iterator[dict[str, Content]]:
    """Files to send at a time: few enough that an interruption costs little."""
    batch: dict[str, Content] = {}
    nbytes = 0
    for path, content in files.items():
        if batch and (nbytes + content.size > _BATCH_BYTES or len(batch) == _BATCH_FILES):
            yield batch
            batch, nbytes = {}, 0
        batch[path] = content
        nbytes += content.size
    if batch:
        yield batch


def _title(stages: Sequence[int], manifest: Manifest) -> str:
    numbers = ", ".join(map(str, stages))
    return f"Stages {numbers} of {manifest.pp_size}, by reshard {__version__}"


def _check_published(
    made: Repository, files: Mapping[str, Content], manifest: Manifest, change: Change
) -> None:
    """Raise `HubError` unless the commit holds what it should, as the Hub itself says."""
    there = made.files()
    wrong = [
        path
        for path, content in files.items()
        if path not in there or not content.equals(there[path])
    ]
    wrong += [path for path in paths_of(manifest) if path not in there]
    wrong += [path for path in change.deletes if path in there]
    if wrong:
        raise HubError(
            f"{made.reference}: commit {made.commit} does not hold what was sent:{listed(sorted(set(wrong)))}",
            hint="a .gitignore in the repository drops files, which must go first; then push again",
        )
