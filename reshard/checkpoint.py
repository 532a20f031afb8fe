"""A checkpoint, opened: every tensor recognised and assigned to its component, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from reshard.bundle import PARTIAL_NAME, BundleSet, unfinished
from reshard.config import ModelConfig
from reshard.errors import (
    BundleError,
    CheckpointError,
    UsageError,
    listed,
    quoted,
)
from reshard.header import SafetensorsHeader, TensorInfo
from reshard.hub_source import open_hub
from reshard.layout import ExpertLayouts, expert_layouts
from reshard.manifest import MANIFEST_NAME
from reshard.names import KINDS, Component, component_of
from reshard.reference import hub_reference, shadowed
from reshard.shards import Shards, read_shards
from reshard.source import (
    STAGE_DIRECTORY,
    WEIGHT_SUFFIXES,
    LocalSource,
    Source,
    is_plain_name,
    read_json,
    sample,
)
from reshard.strict_json import digest, parse_object

_NOT_CARRIED = (".git", ".cache", ".reshard", "reshard.json", "README.md")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds.

    `components` maps every component to its tensors; `headers` are the files that they are read
    from; `left_out` are tensors that no index lists and no component knows; `gaps` says what a
    complete model would have and this one lacks; `bundle` is set where the source is an output of
    reshard.
    """

    source: Source
    config: ModelConfig
    components: Mapping[Component, tuple[TensorInfo, ...]] = field(repr=False)
    headers: tuple[SafetensorsHeader, ...] = field(repr=False)
    layouts: ExpertLayouts = field(repr=False)
    left_out: tuple[TensorInfo, ...]
    side_files: tuple[str, ...]
    gaps: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    bundle: BundleSet | None

    @property
    def tensor_count(self) -> int:
        return sum(len(tensors) for tensors in self.components.values())

    @property
    def tensor_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.components.values() for t in tensors)

    def fingerprint(self) -> str:
        """Identifies the source: file names, sizes, headers, and the data by its published sha256.

        Where there is none, a sample of the data stands for it. An output of reshard has the
        fingerprint of the checkpoint it was made from.
        """
        if self.bundle is not None:
            return self.bundle.manifest.source.fingerprint
        facts = [
            [
                h.file,
                h.size,
                h.sha256,
                self.source.published_sha256(h.file) or sample(self.source, h),
            ]
            for h in self.headers
        ]
        return digest(sorted(facts))


def open_checkpoint(
    path: str | Path, *, include_files: Sequence[str] = (), ignore_files: Sequence[str] = ()
) -> Checkpoint:
    """Open a checkpoint, or a set of stage bundles, reading headers only.

    `path`: a directory, or a repository on the Hub as text: `org/name[@revision]`, `hf://org/name`.
    `include_files`, `ignore_files`: weight files beside the index to take what is new from, or to
    leave alone. Raises a `ReshardError` for anything that is not a checkpoint of a supported model
    in which every tensor is recognised: `CheckpointError`, `UnsupportedModelError`,
    `UnknownTensorError`, `HeaderError`, `BundleError`, `StorageError`, `HubError`.
    """
    if not str(path):
        raise UsageError("SOURCE is empty")
    reference = hub_reference(path)
    source = open_hub(reference) if reference is not None else LocalSource(Path(path))
    if PARTIAL_NAME in source.directories() and MANIFEST_NAME not in source.files():
        raise unfinished(path)
    config = read_config(source, hint=shadowed(path) if reference is None else None)
    if MANIFEST_NAME in source.files():
        if include_files or ignore_files:
            raise UsageError("--include-file and --ignore-file do not apply to a set of bundles")
        bundle = BundleSet.from_source(source)
        shards = _read_bundle(bundle, config)
        side_files = tuple(side.name for side in bundle.manifest.side_files)
    else:
        bundle = None
        shards = read_shards(source, config, include_files, ignore_files)
        side_files = _side_files(source, shards)
    if not shards.tensors:
        raise CheckpointError(f"{quoted(str(path))} holds no tensors")
    components = _by_component(shards, config)
    decoders = [tensors for c, tensors in components.items() if c.kind in ("layer", "mtp")]
    layouts = expert_layouts(chain.from_iterable(decoders), config)
    return Checkpoint(
        source=source,
        config=config,
        components=components,
        headers=tuple(shards.headers),
        layouts=layouts,
        left_out=tuple(shards.left_out),
        side_files=side_files,
        gaps=tuple(_gaps(components, config, bundle)),
        warnings=(
            *config.warnings,
            *shards.warnings,
            *layouts.warnings,
            *_component_warnings(components, config, bundle),
        ),
        notes=tuple(shards.notes),
        bundle=bundle,
    )


def read_config(source: Source, hint: str | None = None) -> ModelConfig:
    """The model facts of a source. Raises as `ModelConfig.from_json` does.

    `hint`: what to do where it has no config.json, if that is known better than here.
    """
    return model_config(source, read_config_json(source, hint))


def read_config_json(source: Source, hint: str | None = None) -> dict[str, Any]:
    """The parsed config.json of a source; `hint` as for `read_config`."""
    if "config.json" not in source.files():
        usual = "give the directory of a Hugging Face checkpoint, or org/name of one on the Hub"
        if "snapshots" in source.directories():
            usual = "in a Hugging Face cache, give the directory of a commit below snapshots/"
        raise CheckpointError(f"{source.name}: there is no config.json", hint=hint or usual)
    raw = read_json(source, "config.json", CheckpointError)
    return parse_object(raw, "config.json", CheckpointError)


def model_config(source: Source, config: Mapping[str, Any]) -> ModelConfig:
    """The model facts in a source's parsed config.json. Raises as `ModelConfig.from_json` does."""
    return ModelConfig.from_json(config, hf_quant_config="hf_quant_config.json" in source.files())


def _read_bundle(bundle: BundleSet, config: ModelConfig) -> Shards:
    """The tensors of the present stages, each once, each in the file of its component."""
    shards = Shards()
    records = bundle.manifest.files()
    bundle.source.prefetch_headers(list(bundle.locate().values()))
    for name, path in bundle.locate().items():
        header = bundle.header(path, records[name])
        shards.headers.append(header)
        check_component(header, records[name].component, config)
        for tensor in header.tensors:
            shards.add(tensor)
    return shards


def check_component(header: SafetensorsHeader, component: Component, config: ModelConfig) -> None:
    """Raise `BundleError` unless all tensors of a bundle's file belong to its component."""
    for tensor in header.tensors:
        if component_of(tensor.name, config) != component:
            raise foreign_file(header.file, f"{quoted(tensor.name)}, which does not belong there")


def foreign_file(path: str, held: str) -> BundleError:
    """The error for a file of a bundle that holds what reshard would not have written."""
    return BundleError(
        f"{quoted(path)} holds {held}",
        hint="the set was not written by reshard, or config.json was changed",
    )


def _by_component(shards: Shards, config: ModelConfig) -> dict[Component, tuple[TensorInfo, ...]]:
    """Components in the order of KINDS and layers."""
    groups: dict[Component, list[TensorInfo]] = {}
    for tensor in shards.tensors.values():
        component = component_of(tensor.name, config)
        assert component is not None, "unknown names were refused"
        groups.setdefault(component, []).append(tensor)
    order = sorted(groups, key=lambda c: (KINDS.index(c.kind), c.layer_id or 0))
    return {component: tuple(groups[component]) for component in order}


def _side_files(source: Source, shards: Shards) -> tuple[str, ...]:
    """Everything at the top level that is neither weights nor about the repository itself."""
    directories = [name for name in source.directories() if not name.startswith(_NOT_CARRIED)]
    if directories:
        shards.notes.append(f"sub-directories are not carried along:{listed(directories)}")
    names = [
        file
        for file in source.files()
        if not file.lower().endswith((*WEIGHT_SUFFIXES, ".index.json"))
        and not file.startswith(_NOT_CARRIED)
    ]
    for name in names:
        if not is_plain_name(name) or STAGE_DIRECTORY.fullmatch(name):
            raise CheckpointError(
                f"{quoted(name)}: a file of this name cannot be carried along",
                hint="rename the file, or remove it",
            )
    return tuple(names)


def _gaps(
    components: Mapping[Component, tuple[TensorInfo, ...]],
    config: ModelConfig,
    bundle: BundleSet | None,
) -> list[str]:
    """What a complete model has and this checkpoint lacks."""
    if bundle is not None and bundle.absent_stages:
        return [f"stages {bundle.absent_stages} of {bundle.manifest.pp_size} are not here"]
    gaps = []
    layers = range(config.num_hidden_layers)
    missing = [str(n) for n in layers if Component("layer", n) not in components]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        gaps.append(f"no tensors of layers {', '.join(missing[:10])}{more}, of {len(layers)}")
    if Component("embed") not in components:
        gaps.append(f"no {config.family.language_prefix}embed_tokens")
    head = [tensor.name for tensor in components.get(Component("head"), ())]
    if not any(name.startswith(config.family.language_prefix) for name in head):
        gaps.append(f"no {config.family.language_prefix}norm (the final norm)")
    if not config.tied and not any(name.startswith("lm_head.") for name in head):
        gaps.append("no lm_head, and config.json does not tie it to the embedding")
    return gaps


def _component_warnings(
    components: Mapping[Component, tuple[TensorInfo, ...]],
    config: ModelConfig,
    bundle: BundleSet | None,
) -> Iterator[str]:
    if bundle is not None and bundle.absent_stages:
        return
    excluded = {e.name for e in bundle.manifest.excluded} if bundle else set()
    visual = Component("visual") in components or "visual" in excluded
    if config.family.has_visual and not visual:
        yield f"{config.model_type} without model.visual.*: engines leave the vision tower unloaded"
    head = [tensor.name for tensor in components.get(Component("head"), ())]
    if config.tied and any(name.startswith("lm_head.") for name in head):
        yield "config.json ties lm_head to the embedding, but the checkpoint has both; both are kept"
