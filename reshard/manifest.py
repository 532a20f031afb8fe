"""reshard.json: what a set of stage bundles is, and which of its stages a directory holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from reshard.config import MAX_LAYERS
from reshard.errors import BundleError, quoted
from reshard.names import Component
from reshard.placement import ENGINES
from reshard.source import SHA256, STAGE_DIRECTORY, WEIGHT_SUFFIXES, is_plain_name
from reshard.strict_json import decode, digest, parse_object, pretty

MANIFEST_NAME = "reshard.json"
FORMAT_VERSION = 1

_FILE_NAME = re.compile(
    r"model-(?:layer-(?P<layer>[0-9]{5})|(?P<kind>visual|embed|head|mtp))"
    r"(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors"
)


@dataclass(frozen=True, slots=True)
class LicenseFacts:
    """What the source's model card says of its license, in the Hub's words for it."""

    license: str | None
    license_name: str | None
    license_link: str | None


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Where the set came from: a directory's name, or a Hub repository and commit."""

    directory: str | None
    repo: str | None
    commit: str | None
    fingerprint: str
    license: LicenseFacts | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the set says of its model, so that nobody needs the weights to know it.

    `tensors` and `bytes` count each tensor of the set once, replicas and exclusions apart.
    """

    model_type: str
    num_hidden_layers: int
    num_experts: int | None
    expert_layout: str
    mtp_expert_layout: str
    quant_method: str | None
    tied: bool
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The serving engine whose needs decided the placement, and the version they were read in."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """The rule that cut the layers, and how many each stage got."""

    rule: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A weight file. `bytes` is its size, `tensor_bytes` what its tensors take of that.

    `sha256` is None where the stage is not present, or was written without checksums.
    """

    name: str
    bytes: int
    tensor_bytes: int
    tensors: int
    header_sha256: str
    sha256: str | None

    @property
    def component(self) -> Component:
        match = _FILE_NAME.fullmatch(self.name)
        assert match is not None, "checked when the manifest was read"
        layer = match["layer"]
        return Component("layer", int(layer)) if layer else Component(match["kind"])


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage: it owns the layers `start_layer` to `end_layer` - 1.

    `replicas` are the components in `files` whose first copy belongs to another stage.
    """

    stage: int
    start_layer: int
    end_layer: int
    replicas: tuple[str, ...]
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Tensors of the source that the set leaves out.

    A whole component (`kind` "component"), or one foreign tensor that no index lists ("tensor").
    """

    kind: str
    name: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that goes along unchanged: config, tokenizer, processor, licence."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole set as planned, seen from one directory; every field as docs/bundle-format.md says.

    `local` gives size and mtime in ns of the source's files, in the root of a set only.
    """

    format_version: int
    tool_version: str
    present: tuple[int, ...]
    source: SourceFacts
    model: ModelFacts
    engine: EngineFacts
    partition: PartitionFacts
    stages: tuple[StageRecord, ...]
    excluded: tuple[Exclusion, ...]
    side_files: tuple[SideFile, ...]
    local: Mapping[str, tuple[int, int]] | None

    @property
    def pp_size(self) -> int:
        return len(self.stages)

    @property
    def set_id(self) -> str:
        """Equal for equal plans of equal sources, whatever is present and wherever it lies."""
        return digest(self._identity())

    def files(self, *, present_only: bool = True) -> dict[str, FileRecord]:
        """The weight files by name, each once, in the order of the stages."""
        return {
            file.name: file
            for stage in reversed(self.stages)
            if not present_only or stage.stage in self.present
            for file in reversed(stage.files)
        }

    def seen_from(
        self, present: tuple[int, ...], sha256: Mapping[str, str | None], *, root: bool
    ) -> Manifest:
        """The manifest of a directory that holds the stages `present`, with these checksums.

        `root`: the directory is the root of a set that this machine split.
        """
        stages = tuple(
            replace(
                stage,
                files=tuple(
                    replace(f, sha256=sha256.get(f.name) if stage.stage in present else None)
                    for f in stage.files
                ),
            )
            for stage in self.stages
        )
        return replace(self, present=present, stages=stages, local=self.local if root else None)

    def differences(self, other: Manifest) -> list[str]:
        """The identifying facts in which two manifests differ."""
        mine, theirs = self._identity(), other._identity()
        return [key for key in mine if mine[key] != theirs[key]]

    def to_bytes(self) -> bytes:
        """The content of reshard.json."""
        document = {"set_id": self.set_id, **asdict(self)}
        if self.local is None:
            del document["local"]
        return pretty(document)

    @classmethod
    def parse(cls, raw: bytes, what: str) -> Manifest:
        """Read reshard.json. Raises `BundleError` for anything but a manifest of this version."""
        document = parse_object(raw, what, BundleError)
        version = document.get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(
                f"{what}: format version {quoted(repr(version))}, this reshard reads {FORMAT_VERSION}",
                hint="upgrade reshard: pip install --upgrade reshard",
            )
        set_id = document.pop("set_id", None)
        document.setdefault("local", None)
        manifest: Manifest = decode(cls, document, what, BundleError)
        _check_consistent(manifest, what)
        if set_id != manifest.set_id:
            raise BundleError(
                f"{what}: set_id is {quoted(repr(set_id))}, the content gives {manifest.set_id}",
                hint="the file was edited or damaged; fetch or split the set again",
            )
        return manifest

    def _identity(self) -> dict[str, Any]:
        document = asdict(self)
        for key in ("tool_version", "present", "local"):
            del document[key]
        del document["source"]["directory"], document["source"]["license"]
        for stage in document["stages"]:
            for file in stage["files"]:
                del file["sha256"]
        return document


def _check_consistent(manifest: Manifest, what: str) -> None:
    """What the types cannot say: names that are safe to use, stages that fit together."""

    def check(ok: bool, message: str) -> None:
        if not ok:
            raise BundleError(f"{what}: {message}", hint="fetch or split the set again")

    stages = manifest.stages
    check(manifest.engine.name in ENGINES, "the engine is not one that this reshard knows")
    hashes = [side.sha256 for side in manifest.side_files]
    hashes += [f.header_sha256 for stage in stages for f in stage.files]
    hashes += [f.sha256 for stage in stages for f in stage.files if f.sha256 is not None]
    check(all(map(SHA256.fullmatch, hashes)), "a checksum is no sha256")
    check(bool(stages), "there are no stages")
    check([s.stage for s in stages] == list(range(len(stages))), "stages are not numbered in order")
    present = manifest.present
    check(present == tuple(sorted(set(present))), "present stages are not in order")
    check(bool(present) and present[-1] < len(stages), "present names no stage of the set")
    counts = tuple(stage.end_layer - stage.start_layer for stage in stages)
    starts = [0, *accumulate(counts)][:-1]
    fits = [stage.start_layer for stage in stages] == starts and min(counts) >= 1
    fits = fits and sum(counts) <= MAX_LAYERS
    fits = fits and counts == manifest.partition.layers
    check(fits, "the layer ranges of the stages do not fit together")
    check(sum(counts) == manifest.model.num_hidden_layers, "the stages do not own every layer")
    records: dict[str, FileRecord] = {}
    for stage in stages:
        names = [file.name for file in stage.files]
        check(len(set(names)) == len(names), f"stage {stage.stage} names a file twice")
        for file in stage.files:
            check(
                _FILE_NAME.fullmatch(file.name) is not None,
                f"{quoted(repr(file.name))} is not the name of a bundle's weight file",
            )
            known = replace(records.setdefault(file.name, file), sha256=file.sha256)
            check(known == file, f"{file.name} differs between stages")
        kinds = {file.component.kind for file in stage.files} - {"layer"}
        check(
            set(stage.replicas) <= kinds and len(set(stage.replicas)) == len(stage.replicas),
            f"the replicas of stage {stage.stage} are not among its files",
        )
        own = {f.component.layer_id for f in stage.files} - {None}
        owned = range(stage.start_layer, stage.end_layer)
        check(
            len(own) == len(owned) and all(layer in owned for layer in own),
            f"the files of stage {stage.stage} are not those of its layers",
        )
    for exclusion in manifest.excluded:
        check(exclusion.kind in ("component", "tensor"), "exclusions are components or tensors")
    names = [side.name for side in manifest.side_files]
    check(len(set(names)) == len(names), "a side file is named twice")
    for side in manifest.side_files:
        ok = is_plain_name(side.name) and side.name != MANIFEST_NAME
        ok = ok and STAGE_DIRECTORY.fullmatch(side.name) is None
        ok = ok and not side.name.lower().endswith((*WEIGHT_SUFFIXES, ".index.json"))
        ok = ok and not side.name.startswith(".reshard")
        check(ok, f"{quoted(repr(side.name))} is not an acceptable side file name")
