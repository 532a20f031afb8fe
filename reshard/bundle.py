"""Reading a bundle set: its root, one of its stage directories, or a flat directory of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import BundleError, CheckpointError, quoted
from reshard.header import SafetensorsHeader
from reshard.hub_source import open_hub
from reshard.index import INDEX_NAME
from reshard.manifest import MANIFEST_NAME, FileRecord, Manifest
from reshard.reference import hub_reference, shadowed
from reshard.source import (
    LocalSource,
    Range,
    Source,
    missing_directory,
    read_header,
    read_json,
    sha256_of,
)

PARTIAL_NAME = ".reshard-partial"
"""The directory in an unfinished output that holds its lock and its journal."""


_PUSH_AGAIN = "push this stage again: reshard push OUT REPO --stage K"
_WHAT_TO_GIVE = "give the output directory of reshard split or pull, or one of its stages"


def stage_directory(stage: int, pp_size: int) -> str:
    """`stage-02-of-04`: numbered from 0, as pipeline ranks are."""
    return f"stage-{stage:02d}-of-{pp_size:02d}"


def prefix_of(directory: str) -> str:
    """What stands before the names of a directory's files: nothing, for the set itself (``)."""
    return f"{directory}/" if directory else ""


@dataclass(frozen=True, slots=True)
class BundleSet:
    """A directory with a manifest, and the files that it names."""

    source: Source
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> BundleSet:
        """Open a finished set: a directory or, given as text, `org/name[@revision]` on the Hub.

        Raises `BundleError` where there is none, `HubError`.
        """
        hint = _WHAT_TO_GIVE
        if not isinstance(path, Path):
            hint += "; or org/name of a set on the Hub"
        reference = hub_reference(path)
        if reference is not None:
            source = open_hub(reference)
        elif Path(path).is_dir():
            source = LocalSource(Path(path))
        else:
            if hub_reference(str(path)) is not None:
                hint = "if it is on the Hub, get it first: a set with reshard pull, a checkpoint "
                hint += "with reshard split"
            raise missing_directory(Path(path), BundleError, hint=hint)
        if MANIFEST_NAME not in source.files():
            if PARTIAL_NAME in source.directories():
                raise unfinished(path)
            if reference is not None and isinstance(source, LocalSource):
                hint = f"the cache may lack a part: hf download {reference.repo} while online"
            raise BundleError(
                f"{quoted(str(path))} is not a bundle: it has no {MANIFEST_NAME}",
                hint=shadowed(path) or hint if reference is None else hint,
            )
        return cls.from_source(source)

    @classmethod
    def from_source(cls, source: Source) -> BundleSet:
        """Read the manifest at the top level of a source that has one."""
        try:
            raw = read_json(source, MANIFEST_NAME, BundleError)
        except CheckpointError as error:  # it is no regular file, or a broken link
            raise BundleError(error.message, hint=_WHAT_TO_GIVE) from None
        return cls(source, Manifest.parse(raw, MANIFEST_NAME))

    @property
    def root(self) -> Path:
        """The directory of a set that lies on this machine."""
        assert isinstance(self.source, LocalSource)
        return self.source.root

    def directory_of(self, stage: int) -> str:
        """Where the files of a present stage lie: its directory, or `` for the set itself."""
        name = stage_directory(stage, self.manifest.pp_size)
        return name if name in self.source.directories() else ""

    def path_of(self, stage: int, file: str) -> str:
        """The path of a present stage's file, relative to the set."""
        return prefix_of(self.directory_of(stage)) + file

    def locate(self) -> dict[str, str]:
        """Every present weight file, once: its name -> its path in the lowest stage that has it."""
        paths: dict[str, str] = {}
        for stage in self.manifest.present:
            for file in self.manifest.stages[stage].files:
                paths.setdefault(file.name, self.path_of(stage, file.name))
        return paths

    def header(self, path: str, record: FileRecord) -> SafetensorsHeader:
        """The header of one of its weight files; see `checked_header`."""
        return checked_header(self.source, path, record)

    def announced_sha256(self, path: str, record: FileRecord) -> str | None:
        """What one of its weight files must be, which is on another machine.

        Raises `BundleError` where the file is missing there, or is not the manifest's.
        """
        if not self.source.holds(path, record.bytes):
            raise BundleError(
                f"{quoted(path)}: missing, or not of the size in the manifest: the set is not whole",
                hint=_PUSH_AGAIN,
            )
        published = self.source.published_sha256(path)
        if None not in (published, record.sha256) and published != record.sha256:
            raise BundleError(
                f"{quoted(path)}: its published sha256 is {published}, the manifest says "
                f"{record.sha256}",
                hint=_PUSH_AGAIN,
            )
        return record.sha256 or published

    def in_place(self, directory: str, sizes: Mapping[str, int]) -> bool:
        """Whether these files lie in a directory of the set, in their sizes; nothing is read."""
        prefix = prefix_of(directory)
        return all(self.source.holds(prefix + name, size) for name, size in sizes.items())

    def complete(self, directory: str) -> bool:
        """Whether what stands beside the weights is in place: side files, index and manifest."""
        prefix = prefix_of(directory)
        sides = {side.name: side.bytes for side in self.manifest.side_files}
        others = all(self.source.holds(prefix + name) for name in (INDEX_NAME, MANIFEST_NAME))
        return others and self.in_place(directory, sides)

    def intact_stages(self) -> tuple[int, ...]:
        """The present stages whose directories hold all that they should, in its size."""
        return tuple(
            stage
            for stage in self.manifest.present
            if self.complete(self.directory_of(stage))
            and self.in_place(
                self.directory_of(stage),
                {file.name: file.bytes for file in self.manifest.stages[stage].files},
            )
        )

    def check_side_files(self, *names: str) -> None:
        """Raise `BundleError` unless the side files are there, with the bytes of the manifest.

        `names`: look at these only.
        """
        for side in self.manifest.side_files:
            if names and side.name not in names:
                continue
            whole = [Range(side.name, 0, side.bytes)]
            there = self.in_place("", {side.name: side.bytes})
            if not there or sha256_of(self.source.read_many(whole)) != side.sha256:
                hint = "to restore it, run the reshard split or pull that made this set again"
                if "commit" in self.source.origin:
                    hint = "the cache may lack a part: hf download the repository while online"
                raise BundleError(f"{quoted(side.name)} is missing or was changed", hint=hint)

    @property
    def absent_stages(self) -> str:
        """The stages that are not here, to be shown: `0, 2`."""
        absent = set(range(self.manifest.pp_size)) - set(self.manifest.present)
        return ", ".join(map(str, sorted(absent)))

    def require_all_stages(self, purpose: str) -> None:
        """Raise `BundleError` unless every stage is present."""
        if self.absent_stages:
            hint = "push the missing stages to the same branch first"
            if isinstance(self.source, LocalSource):
                hint = "split or pull the missing stages into the same directory first"
            raise BundleError(
                f"stages {self.absent_stages} are not here, and {purpose} needs all", hint=hint
            )


def unfinished(path: str | Path) -> BundleError:
    """The error for a directory in which a run was begun and not finished."""
    return BundleError(
        f"{quoted(str(path))} is an unfinished output: it has no {MANIFEST_NAME} yet",
        hint="run the command that began it again; it continues where it stopped",
    )


def checked_header(source: Source, path: str, record: FileRecord) -> SafetensorsHeader:
    """The header of a weight file, proved to be the one that its record describes.

    Raises `BundleError` where the file is missing, or its size or header differ.
    """
    try:
        size = source.stamp(path).size
    except CheckpointError as error:
        hint = "to restore it, run the reshard split or pull that made this directory again"
        raise BundleError(error.message, hint=hint) from None
    if size != record.bytes:
        raise BundleError(
            f"{quoted(path)}: {size:,} bytes, the manifest says {record.bytes:,}",
            hint="the file was truncated or replaced; fetch or split this stage again",
        )
    header = read_header(source, path)
    if header.sha256 != record.header_sha256:
        raise BundleError(
            f"{quoted(path)}: its header is not the one in the manifest",
            hint="the file belongs to another set or was changed; fetch or split it again",
        )
    return header
