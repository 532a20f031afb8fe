"""Loading one stage: only its files are opened, and nothing is handed out that is not proved."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from reshard.bundle import BundleSet, stage_directory
from reshard.checkpoint import check_component, foreign_file, model_config, read_config_json
from reshard.config import ModelConfig
from reshard.errors import (
    BundleError,
    DeviceError,
    OutputError,
    UsageError,
    quoted,
    storage_errors,
)
from reshard.header import TensorInfo
from reshard.hub_source import load_hub
from reshard.journal import open_own
from reshard.manifest import MANIFEST_NAME, FileRecord
from reshard.names import Component, parse_expert
from reshard.progress import Progress, Silent
from reshard.pull import pull
from reshard.runtime.config import MoeConfig
from reshard.runtime.dtypes import as_tensor, require_torch_dtype
from reshard.runtime.expert_layout import Key
from reshard.runtime.experts import ExpertWeights, expert_weights
from reshard.runtime.reading import read_shares
from reshard.runtime.share import Rank, Share, StageShare, plan_share
from reshard.runtime.weights import Experts, StageWeights, require_layer
from reshard.source import LocalSource, Range, sha256_of
from reshard.tasks import default_jobs, in_parallel, watched


def load_stage(
    path_or_repo: str | Path,
    *,
    stage: int | None = None,
    pp_size: int | None = None,
    device: str | torch.device | None = None,
    verify: bool = False,
    mmap: bool = True,
    ep: tuple[int, int] = (0, 1),
    tp: tuple[int, int] = (0, 1),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> StageWeights:
    """Load one stage of a set of bundles.

    path_or_repo: a stage directory, a directory of pulled stages, the root of a set, or, as text,
    `org/name[@revision]` on the Hub, of which only this stage is pulled, once for all processes of a
    machine. stage: which one; needed where there are several. pp_size: refuse a set that has not so
    many. device: default is CUDA, else the CPU.

    Names, dtypes, shapes and offsets are proved by the header hashes of the manifest; the data, too,
    where `verify` is set, which reads every file of the stage once more.

    mmap: on the CPU, tensors are views of mapped files, read when used; with False, files are read
    at once, in large pieces, as network file systems like it. On CUDA they are always read: into one
    buffer for each file, through pinned buffers of 32 MiB for each of `jobs` threads.

    ep: this rank and the size of its expert-parallel group; only its range of the experts is read.
    tp: likewise for the rows of gate and up and the columns of down, of experts and shared experts.

    Raises `BundleError` where the set is incomplete, foreign, or not what was asked for;
    `UsageError` for arguments that do not fit; `WeightsError` for weights that torch cannot hold, or
    `tp` cannot divide; `DeviceError`, `HubError`, `StorageError`, `SourceChangedError`.
    """
    ep_rank, tp_rank = _rank("ep", ep), _rank("tp", tp)
    where = _device(device)
    bundle = BundleSet.open(path_or_repo)
    stage = _choose_stage(bundle, stage, pp_size)
    if not isinstance(bundle.source, LocalSource):
        bundle = _pull_stage(bundle, stage, jobs, progress)
    source = bundle.source
    assert isinstance(source, LocalSource)
    jobs = jobs or default_jobs()
    reports = progress or Silent()

    _check_config(bundle)
    config = read_config_json(source)
    model = model_config(source, config)
    components = _check_headers(bundle, stage, model)
    if verify:
        _verify_data(bundle, source, stage, jobs, reports)
    moe_config = MoeConfig.from_json(config, model) if tp_rank.size > 1 else None
    share = plan_share(components.values(), ep_rank, tp_rank, moe_config)
    data = read_shares(
        source,
        share,
        where,
        mapped=mmap and where.type == "cpu",
        jobs=jobs,
        progress=reports,
    )
    stacks = {
        part: as_tensor(bytes_, part.dtype, (len(part.names), *part.shape))
        for part, bytes_ in zip(share.shares, data, strict=True)
    }
    tensors = {
        name: tensor
        for part, stack in stacks.items()
        for name, tensor in zip(part.names, stack.unbind(), strict=True)
    }
    own = bundle.manifest.stages[stage]
    layers = range(own.start_layer, own.end_layer)
    makers = _makers(share, stacks, model, layers, lambda: MoeConfig.from_json(config, model))
    return StageWeights(
        manifest=bundle.manifest,
        stage=stage,
        config=config,
        model=model,
        device=where,
        ep=ep_rank,
        tp=tp_rank,
        tensors=tensors,
        experts=Experts(makers, partial(require_layer, bundle.manifest, stage)),
    )


def _rank(name: str, given: tuple[int, int]) -> Rank:
    rank, size = given
    if not 0 <= rank < size:
        raise UsageError(
            f"{name} is {given!r}: rank {rank} of {size}",
            hint=f"give (rank, size), with ranks from 0: {name}=(1, 2) is the second of two",
        )
    return Rank(rank, size)


def _device(device: str | torch.device | None) -> torch.device:
    """The device, with its number. Raises `DeviceError` where it is not there."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        known = found.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise UsageError(f"device {quoted(str(device))} is neither cpu nor cuda")
    if found.type == "cpu":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = torch.cuda.current_device() if count and found.index is None else found.index or 0
    if number >= count:
        devices = f"CUDA devices 0 to {count - 1}" if count else "no CUDA device"
        raise DeviceError(
            f"device {quoted(str(device))} is not there: torch {torch.__version__} sees {devices}",
            hint="check the driver and CUDA_VISIBLE_DEVICES, or use the device cpu",
        )
    return torch.device("cuda", number)


def _choose_stage(bundle: BundleSet, stage: int | None, pp_size: int | None) -> int:
    """The stage to load. Raises `BundleError` where the set is not what was asked for."""
    manifest = bundle.manifest
    here = ", ".join(map(str, manifest.present))
    if pp_size is not None and pp_size != manifest.pp_size:
        raise BundleError(
            f"{bundle.source.name} has {manifest.pp_size} stages, {pp_size} were asked for",
            hint=f"start {manifest.pp_size} ranks, or split again with --pp-size {pp_size}",
        )
    if stage is None:
        if len(manifest.present) > 1:
            raise UsageError(
                f"{bundle.source.name} has stages {here}; say which one",
                hint="give stage=K (--stage K), or the directory of one stage",
            )
        return manifest.present[0]
    if not 0 <= stage < manifest.pp_size:
        raise UsageError(
            f"stage {stage} is not one of {manifest.pp_size}: they are numbered from 0"
        )
    if stage not in manifest.present:
        raise BundleError(
            f"stage {stage} is not in {bundle.source.name}; it has {here}",
            hint=f"give the directory of stage {stage}, or get it: reshard pull OUT DIRECTORY "
            f"--stage {stage}",
        )
    return stage


def _pull_stage(
    bundle: BundleSet, stage: int, jobs: int | None, progress: Progress | None
) -> BundleSet:
    """The stage on this machine; the first process that wants it fetches it, the others wait."""
    origin = bundle.source.origin
    cache: Path = load_hub().assets_directory(origin["repo"], origin["commit"])
    directory = cache / stage_directory(stage, bundle.manifest.pp_size)
    lock = directory.with_suffix(".lock")
    damaged = f"what is cached may be damaged: remove {quoted(str(directory))}, then try again"
    try:
        there = _pulled(directory, stage, bundle)
    except BundleError as error:
        raise BundleError(error.message, hint=damaged) from None
    if there is not None:
        return there
    try:
        with storage_errors(lock), open_own(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            pull(bundle, directory, [stage], jobs=jobs, progress=progress)
    except OutputError as error:
        raise OutputError(error.message, hint=damaged) from None
    return BundleSet.open(directory)


def _pulled(directory: Path, stage: int, bundle: BundleSet) -> BundleSet | None:
    """The stage, if it was pulled to a directory before, whole."""
    if not (directory / MANIFEST_NAME).exists():
        return None
    there = BundleSet.open(directory)
    whole = there.manifest.set_id == bundle.manifest.set_id and stage in there.intact_stages()
    return there if whole else None


def _check_config(bundle: BundleSet) -> None:
    """Raise `BundleError` unless config.json is the one of the manifest: it says what tensors are."""
    if "config.json" not in {side.name for side in bundle.manifest.side_files}:
        raise BundleError(
            f"{bundle.source.name}: the manifest does not vouch for a config.json",
            hint="the set was not written by reshard; split or fetch it again",
        )
    bundle.check_side_files("config.json")


def _check_headers(
    bundle: BundleSet, stage: int, model: ModelConfig
) -> dict[Component, list[TensorInfo]]:
    """The tensors of the stage by component, proved by the header hashes of the manifest."""
    components: dict[Component, list[TensorInfo]] = {}
    owner: dict[str, str] = {}
    for record in bundle.manifest.stages[stage].files:
        path = bundle.path_of(stage, record.name)
        header = bundle.header(path, record)
        check_component(header, record.component, model)
        for tensor in header.tensors:
            require_torch_dtype(tensor.dtype, tensor.shape, tensor.name)
            if tensor.name in owner:
                raise foreign_file(path, f"{quoted(tensor.name)}, as {owner[tensor.name]} does")
            owner[tensor.name] = quoted(path)
        if len(header.tensors) != record.tensors:
            raise foreign_file(path, f"{len(header.tensors)} tensors, not {record.tensors}")
        components.setdefault(record.component, []).extend(header.tensors)
    return components


def _verify_data(
    bundle: BundleSet, source: LocalSource, stage: int, jobs: int, progress: Progress
) -> None:
    """Raise `BundleError` unless every file of the stage has the sha256 of the manifest."""
    records = bundle.manifest.stages[stage].files
    progress.start("verify", sum(record.bytes for record in records))

    def check(record: FileRecord, stop: Event) -> None:
        path = bundle.path_of(stage, record.name)
        if record.sha256 is None:
            raise BundleError(
                f"{quoted(path)}: the manifest has no sha256 to verify it with",
                hint=f"add them: reshard verify {bundle.source.name} --write-checksums",
            )
        whole = Range(path, 0, record.bytes)
        sha256 = sha256_of(watched(source.read_many([whole]), stop, progress))
        if sha256 != record.sha256:
            raise BundleError(
                f"{quoted(path)}: sha256 is {sha256}, the manifest says {record.sha256}",
                hint="the file was damaged; fetch or split this stage again",
            )

    for _ in in_parallel(check, records, jobs):
        pass


def _makers(
    share: StageShare,
    stacks: Mapping[Share, Tensor],
    model: ModelConfig,
    layers: range,
    config: Callable[[], MoeConfig],
) -> dict[int, Callable[[], ExpertWeights]]:
    """How to make the experts of each sparse layer among `layers`."""
    of_modules = share.of_modules()

    def make(module: str) -> ExpertWeights:
        tensors: dict[Key, Tensor] = {}
        for key, (first, *_) in of_modules[module].items():  # if there are more, they are refused
            fused = parse_expert(first.names[0]) is None
            tensors[key] = stacks[first][0] if fused else stacks[first]
        return expert_weights(module, share.modules[module], tensors, config())

    prefix = f"{model.family.language_prefix}layers."
    names = {layer: f"{prefix}{layer}.mlp.experts" for layer in layers}
    return {layer: partial(make, name) for layer, name in names.items() if name in share.modules}
