"""What a repository holds, and what has to change in it so that it holds a set of bundles."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.bundle import BundleSet, prefix_of, stage_directory
from reshard.card import CARD_NAME, MAX_OWN_CARD, is_ours, model_card
from reshard.errors import BundleError, HubError, listed, storage_errors
from reshard.hub_source import HubSource, blob_sha1
from reshard.index import INDEX_NAME, encode_index, parse_index
from reshard.manifest import MANIFEST_NAME, Manifest
from reshard.reference import HubReference
from reshard.report import WeightFile
from reshard.source import foreign_weights, read_json

if TYPE_CHECKING:
    from reshard.hub import HubFile, Repository

_NEVER_DELETED = (CARD_NAME, ".gitattributes", ".gitignore")
_ELSEWHERE = "choose another repository, or a branch without other weights with --revision"


@dataclass(frozen=True, slots=True)
class Content:
    """A file as it should be in the repository: a local one, or bytes."""

    data: Path | bytes = field(repr=False)
    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Content:
        return cls(data, len(data), hashlib.sha256(data).hexdigest())

    def equals(self, file: HubFile) -> bool:
        """Whether the repository's file is this one; small files have git's checksum only."""
        if file.size != self.size:
            return False
        if file.sha256 is not None:
            return file.sha256 == self.sha256
        if isinstance(self.data, bytes):
            return file.blob_id == blob_sha1(self.data)
        with storage_errors(self.data):
            return file.blob_id == blob_sha1(self.data.read_bytes())


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit has to do. `copies` maps paths to others of the parent with the same content."""

    adds: Mapping[str, Content]
    copies: Mapping[str, str]
    deletes: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.adds or self.copies or self.deletes)


@dataclass(frozen=True, slots=True)
class Held:
    """What the repository holds: its files, and the set that its reshard.json describes."""

    source: HubSource
    files: Mapping[str, HubFile]
    manifest: Manifest | None

    @classmethod
    def read(cls, repository: Repository) -> Held:
        """Raises `HubError` where there is a reshard.json that cannot be read."""
        files = repository.files()
        source = HubSource(repository, files)
        if MANIFEST_NAME not in files:
            return cls(source, files, None)
        try:
            raw = read_json(source, MANIFEST_NAME, BundleError)
            return cls(source, files, Manifest.parse(raw, MANIFEST_NAME))
        except BundleError as error:
            raise HubError(
                f"{repository.reference}: the set that it holds cannot be read: {error.message}",
                hint=error.hint or _ELSEWHERE,
            ) from None

    @property
    def set_paths(self) -> set[str]:
        """The files that its manifest speaks for, whether they are there or not."""
        return set(paths_of(self.manifest)) if self.manifest is not None else set()

    def replaced_notes(self, files: Mapping[str, Content]) -> tuple[str, ...]:
        """Which files of somebody else `files` take the place of."""
        ours = self.set_paths
        replaced = [
            path
            for path, content in files.items()
            if path in self.files and path not in ours and not content.equals(self.files[path])
        ]
        names = ", ".join(sorted(replaced))
        return (f"replaced in the repository, where they were of no set: {names}",) * bool(names)

    def require_room(
        self, manifest: Manifest, stages: Collection[int], *, adding_only: bool
    ) -> None:
        """Raise `HubError` unless this revision holds no weights but those of a set of reshard.

        That set must be the one of `manifest`, too, if `adding_only`, or if `stages`, which are to
        be pushed, are not all: nothing whole is replaced by parts.
        """
        foreign = foreign_weights(self.files, self.set_paths)
        where = self.source.name
        if foreign:
            raise HubError(
                f"{where} holds weights that no reshard.json there names:{listed(foreign)}",
                hint=_ELSEWHERE,
            )
        if self.manifest is None or self.manifest.set_id == manifest.set_id:
            return
        if adding_only or len(stages) < manifest.pp_size:
            raise HubError(
                f"{where} holds another set; it differs in "
                f"{', '.join(self.manifest.differences(manifest))}",
                hint=f"only a push of all stages replaces it; or {_ELSEWHERE}",
            )


class LocalStages:
    """The stages to push, proved: their checksums, and which tensors each of their files holds.

    `sides`: the directory of a stage, whose side files are proved too.
    """

    def __init__(
        self,
        bundle: BundleSet,
        stages: Sequence[int],
        sha256: Mapping[str, str],
        weights: Iterable[WeightFile],
    ) -> None:
        self.bundle = bundle
        self.stages = stages
        self.sha256 = sha256
        self.tensors = {
            file.record.name: [tensor.name for tensor in file.header.tensors] for file in weights
        }
        self.sides = bundle.root / bundle.directory_of(stages[0])


def plan_change(files: Mapping[str, Content], manifest: Manifest, held: Held) -> Change:
    """What puts `files` into the repository and removes what its old manifest alone speaks for."""
    adds: dict[str, Content] = {}
    copies: dict[str, str] = {}
    twins = {file.sha256: path for path, file in held.files.items() if file.sha256 is not None}
    for path, content in files.items():
        there = held.files.get(path)
        if there is not None and content.equals(there):
            continue
        twin = twins.get(content.sha256)
        if twin is None:
            adds[path] = content
        else:
            copies[path] = twin
    deletes = held.set_paths.intersection(held.files).difference(paths_of(manifest), _NEVER_DELETED)
    return Change(adds, copies, sorted(deletes))


def paths_of(manifest: Manifest) -> Iterator[str]:
    """Every file of a repository that its manifest speaks for, once."""
    directories = {
        f"{stage_directory(stage, manifest.pp_size)}/": manifest.stages[stage].files
        for stage in manifest.present
    }
    for directory, files in {"": (), **directories}.items():
        yield from (directory + file.name for file in files)
        yield from (directory + side.name for side in manifest.side_files)
        yield directory + INDEX_NAME
        yield directory + MANIFEST_NAME


def wanted_files(local: LocalStages, held: Held) -> tuple[Manifest, dict[str, Content]]:
    """The set as the repository will hold it, and the files of it that are known here.

    Stages of the same set that the repository has and this push does not bring stay; their files
    are proved to be there, for the root's index will name them.
    """
    ours = local.bundle.manifest
    kept: tuple[int, ...] = ()
    sha256: dict[str, str | None] = dict(local.sha256)
    tensors = dict(local.tensors)
    if held.manifest is not None and held.manifest.set_id == ours.set_id:
        kept = tuple(stage for stage in held.manifest.present if stage not in local.stages)
        _keep(kept, held, sha256, tensors)
    manifest = ours.seen_from(tuple(sorted({*local.stages, *kept})), sha256, root=False)
    files: dict[str, Content] = {}
    for stage in local.stages:
        directory = stage_directory(stage, ours.pp_size)
        for file in ours.stages[stage].files:
            path = local.bundle.root / local.bundle.path_of(stage, file.name)
            files[f"{directory}/{file.name}"] = Content(path, file.bytes, local.sha256[file.name])
        seen = ours.seen_from((stage,), sha256, root=False)
        _add_others(files, directory, local.sides, seen, tensors)
    _add_others(files, "", local.sides, manifest, tensors)
    return manifest, files


def _add_others(
    files: dict[str, Content],
    directory: str,
    sides: Path,
    manifest: Manifest,
    tensors: Mapping[str, Sequence[str]],
) -> None:
    """What stands beside the weights, in a stage's directory or (``) at the root of the set."""
    prefix = prefix_of(directory)
    for side in manifest.side_files:
        files[prefix + side.name] = Content(sides / side.name, side.bytes, side.sha256)
    weight_map: dict[str, str] = {}
    for stage in reversed(manifest.present):  # so that the lowest one that has a file counts
        path = "" if directory else prefix_of(stage_directory(stage, manifest.pp_size))
        for file in manifest.stages[stage].files:
            weight_map |= dict.fromkeys(tensors[file.name], path + file.name)
    total = sum(file.tensor_bytes for file in manifest.files().values())
    files[prefix + INDEX_NAME] = Content.of(encode_index(weight_map, total))
    files[prefix + MANIFEST_NAME] = Content.of(manifest.to_bytes())


def _keep(
    stages: Sequence[int],
    held: Held,
    sha256: dict[str, str | None],
    tensors: dict[str, list[str]],
) -> None:
    """Add what the repository knows of stages that stay in it: checksums and names of tensors.

    Raises `HubError` where one is not whole.
    """
    damaged = [stage for stage in stages if not _kept_whole(stage, held, sha256, tensors)]
    if damaged:
        numbers = ",".join(map(str, damaged))
        raise HubError(
            f"{held.source.name}: stages {numbers}, which are to stay there, are not whole",
            hint=f"push them as well, in one run with the others: --stage {numbers}",
        )


def _kept_whole(
    stage: int, held: Held, sha256: dict[str, str | None], tensors: dict[str, list[str]]
) -> bool:
    """Add what the repository knows of a stage; False where it is not whole."""
    assert held.manifest is not None, "it has this stage"
    directory = stage_directory(stage, held.manifest.pp_size)
    if not BundleSet(held.source, held.manifest).complete(directory):
        return False
    path = f"{directory}/{INDEX_NAME}"
    try:
        index = parse_index(read_json(held.source, path, HubError), path, error=HubError)
    except HubError:
        return False
    there: dict[str, list[str]] = {}
    for name, file_name in index.weight_map.items():
        there.setdefault(file_name, []).append(name)
    for file in held.manifest.stages[stage].files:
        published = held.files.get(f"{directory}/{file.name}")
        if published is None or (published.size, published.sha256) != (file.bytes, file.sha256):
            return False
        if len(tensors.setdefault(file.name, there.get(file.name, []))) != file.tensors:
            return False
        if sha256.setdefault(file.name, file.sha256) != file.sha256:
            return False
    return True


def add_card(
    files: dict[str, Content], manifest: Manifest, reference: HubReference, held: Held
) -> tuple[str, ...]:
    """Add the model card, unless somebody else wrote the one that is there; then a note says so."""
    if CARD_NAME in held.files:
        nbytes = held.files[CARD_NAME].size
        card = held.source.read(CARD_NAME, 0, min(nbytes, MAX_OWN_CARD + 1))
        if nbytes > MAX_OWN_CARD or not is_ours(card.decode("utf-8", "replace")):
            return (
                f"{CARD_NAME} in the repository is not reshard's, or was edited: left as it is",
            )
    text = model_card(manifest, reference)
    files[CARD_NAME] = Content.of(text.encode("utf-8"))
    return ()
