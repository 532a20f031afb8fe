"""The plan: which stage gets which files, made of which tensors. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from reshard.canonical import FilePlan, plan_files
from reshard.checkpoint import Checkpoint
from reshard.errors import PlanError, UsageError, quoted
from reshard.layout import NONE
from reshard.manifest import Exclusion, FileRecord, ModelFacts, StageRecord
from reshard.names import KINDS, Component
from reshard.partition import (
    Partition,
    balanced_partition,
    even_partition,
    explicit_partition,
)
from reshard.placement import EXCLUDABLE, Engine, Placement, minimum_first_layers, place

_BALANCE_STEPS = 10**6  # below a second; every real model has fewer


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage. `replicas` are the components whose first copy belongs to another stage."""

    stage: int
    layers: range
    files: tuple[FilePlan, ...]
    replicas: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(file.tensor_bytes for file in self.files)

    def record(self) -> StageRecord:
        """The stage as the manifest describes it, no checksum known yet."""
        files = tuple(
            FileRecord(f.name, f.size, f.tensor_bytes, len(f.tensors), f.header_sha256, None)
            for f in self.files
        )
        return StageRecord(self.stage, self.layers.start, self.layers.stop, self.replicas, files)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The whole set, always: a run may write some of its stages only."""

    checkpoint: Checkpoint
    engine: Engine
    partition: Partition
    stages: tuple[StagePlan, ...] = field(repr=False)
    excluded: tuple[Exclusion, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def pp_size(self) -> int:
        return len(self.stages)

    def files(self) -> dict[str, FilePlan]:
        """Every file of the set once, by name."""
        return {file.name: file for stage in self.stages for file in stage.files}

    def model_facts(self) -> ModelFacts:
        config, layouts = self.checkpoint.config, self.checkpoint.layouts
        files = self.files().values()
        has_mtp = any(file.component.kind == "mtp" for file in files)
        return ModelFacts(
            model_type=config.model_type,
            num_hidden_layers=config.num_hidden_layers,
            num_experts=config.num_experts,
            expert_layout=layouts.of(mtp=False),
            mtp_expert_layout=layouts.of(mtp=True) if has_mtp else NONE,
            quant_method=config.quant_method,
            tied=config.tied,
            tensors=sum(len(file.tensors) for file in files),
            bytes=sum(file.tensor_bytes for file in files),
        )


def build_plan(
    checkpoint: Checkpoint,
    pp_size: int,
    *,
    engine: str = "sglang",
    layers: Sequence[int] | None = None,
    balance: bool = False,
    exclude: Collection[str] = (),
    replicate: Collection[str] = (),
) -> ReshardPlan:
    """Plan `pp_size` stages of a checkpoint.

    engine: `sglang` or `vllm`: decides the default partition and the placement of what is no layer.
    layers: layer counts per stage instead of the engine's rule; balance: the partition whose
    largest stage is smallest. exclude: `mtp`, `visual`; replicate: `visual`, `embed`, `head` go to
    every stage.

    Raises `PlanError` where the checkpoint is incomplete or the engine would be silently wrong with
    such stages, `UsageError` where the arguments do not fit the model or each other.
    """
    config = checkpoint.config
    if checkpoint.bundle is not None:
        checkpoint.bundle.require_all_stages("a new partition")
    if checkpoint.gaps:
        raise PlanError(
            "the checkpoint is incomplete: " + "; ".join(checkpoint.gaps),
            hint="download it again; reshard inspect shows what is there",
        )
    default = even_partition(engine, config.num_hidden_layers, pp_size)
    for kind in exclude:
        if kind not in EXCLUDABLE:
            raise UsageError(f"--exclude {quoted(kind)}: can be {', '.join(EXCLUDABLE)}")
    kept = {c: t for c, t in checkpoint.components.items() if c.kind not in exclude}
    files = {component: plan_files(component, tensors) for component, tensors in kept.items()}
    placement = place(config, {c.kind for c in kept}, engine, pp_size, replicate)
    first_minimum = minimum_first_layers(config, pp_size)
    if layers is not None and balance:
        raise UsageError("--layers and --balance exclude each other")
    partition = default
    if layers is not None:
        partition = explicit_partition(layers, config.num_hidden_layers, pp_size)
    elif balance:
        partition = _balance(files, placement, config.num_hidden_layers, pp_size, first_minimum)
    if partition.counts == default.counts:
        partition = default  # equal stages are the same set, however they were asked for
    if partition.counts[0] < first_minimum:
        raise PlanError(
            f"stage 0 would own {partition.counts[0]} layers, but the first {first_minimum} layers "
            "receive vision features (deepstack), which engines do not send between stages",
            hint=f"use fewer stages, or --layers with at least {first_minimum} for stage 0",
        )
    stages = tuple(
        _stage(stage, partition.layers(stage), placement, files) for stage in range(pp_size)
    )
    notes = checkpoint.notes + _engine_notes(placement, pp_size)
    if layers is None and not balance:
        notes += _balance_note(stages, files, placement, first_minimum)
    return ReshardPlan(
        checkpoint=checkpoint,
        engine=placement.engine,
        partition=partition,
        stages=stages,
        excluded=_exclusions(checkpoint, exclude),
        warnings=checkpoint.warnings + _engine_warnings(checkpoint, engine),
        notes=notes,
    )


def _stage(
    stage: int,
    layers: range,
    placement: Placement,
    files: dict[Component, tuple[FilePlan, ...]],
) -> StagePlan:
    here = placement.kinds_on(stage)
    components = [
        c for c in files if (c.layer_id in layers if c.layer_id is not None else c.kind in here)
    ]
    replicas = tuple(kind for kind in here if placement.stages[kind][0] != stage)
    return StagePlan(stage, layers, tuple(f for c in components for f in files[c]), replicas)


def _balance_note(
    stages: Sequence[StagePlan],
    files: dict[Component, tuple[FilePlan, ...]],
    placement: Placement,
    first_minimum: int,
) -> tuple[str, ...]:
    """What `--balance` would gain, where that is worth a word."""
    layers = sum(len(stage.layers) for stage in stages)
    if len(stages) * layers**2 > _BALANCE_STEPS:
        return ()
    balanced = _balance(files, placement, layers, len(stages), first_minimum)
    others = [
        _stage(number, balanced.layers(number), placement, files) for number in range(len(stages))
    ]
    now, then = (max(stage.tensor_bytes for stage in s) for s in (stages, others))
    if then >= 0.97 * now:
        return ()
    counts = ",".join(map(str, balanced.counts))
    return (
        f"--balance (layers {counts}) would make the largest stage {1 - then / now:.0%} smaller",
    )


def _balance(
    files: dict[Component, tuple[FilePlan, ...]],
    placement: Placement,
    layers: int,
    pp_size: int,
    first_minimum: int,
) -> Partition:
    nbytes = {c: sum(file.tensor_bytes for file in planned) for c, planned in files.items()}
    stage_bytes = [
        sum(nbytes[Component(kind)] for kind in placement.kinds_on(stage))
        for stage in range(pp_size)
    ]
    layer_bytes = [nbytes[Component("layer", layer)] for layer in range(layers)]
    return balanced_partition(layer_bytes, stage_bytes, first_minimum)


def _exclusions(checkpoint: Checkpoint, exclude: Collection[str]) -> tuple[Exclusion, ...]:
    """What this plan leaves out, after what an earlier one has left out already."""
    excluded = list(checkpoint.bundle.manifest.excluded) if checkpoint.bundle else []
    for kind in KINDS:
        tensors = checkpoint.components.get(Component(kind)) if kind in exclude else None
        if tensors:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            excluded.append(Exclusion("component", kind, len(tensors), nbytes))
    for tensor in checkpoint.left_out:
        excluded.append(Exclusion("tensor", tensor.name, 1, tensor.nbytes))
    return tuple(sorted(excluded, key=lambda e: (e.kind, e.name, e.bytes)))


def _engine_warnings(checkpoint: Checkpoint, engine: str) -> tuple[str, ...]:
    if checkpoint.bundle is None or checkpoint.bundle.manifest.engine.name == engine:
        return ()
    made_for = checkpoint.bundle.manifest.engine.name
    return (f"the source was split for {made_for}, this plan is for {engine}",)


def _engine_notes(placement: Placement, pp_size: int) -> tuple[str, ...]:
    visual = placement.stages.get("visual")
    if placement.engine.name != "vllm" or visual is None or len(visual) == pp_size:
        return ()
    older = "vLLM 0.32 and older, and the older runner of 0.33"
    return (f"{older}, need the vision tower on every stage: add --replicate visual for them",)
