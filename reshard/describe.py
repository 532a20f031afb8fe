"""The JSON documents of sets, planned or present; docs/json.md describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.finish import Outcome
from reshard.launch import share_stages
from reshard.manifest import Exclusion, ModelFacts, StageRecord
from reshard.names import COMPONENT_KEYS, component_key
from reshard.plan import ReshardPlan
from reshard.push import Pushed


def plan_document(plan: ReshardPlan) -> dict[str, Any]:
    """The document of `reshard plan --json`."""
    return {
        **_set_document(
            plan.engine.name,
            [stage.record() for stage in plan.stages],
            plan.excluded,
            plan.model_facts(),
            plan.checkpoint.source.origin,
        ),
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }


def outcome_document(
    outcome: Outcome,
    origin: Mapping[str, str],
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of `split`, `pull` and `merge`: the set's, and how its files came about.

    `origin`: where they came from, see `Source.origin`.
    """
    manifest, counts = outcome.manifest, outcome.counts
    return {
        **_set_document(
            manifest.engine.name,
            manifest.stages,
            manifest.excluded,
            manifest.model,
            origin,
        ),
        "warnings": list(warnings),
        "notes": list(notes),
        "present": list(manifest.present),
        "set_id": manifest.set_id,
        "changed": outcome.changed,
        **{how: counts.get(how, 0) for how in HOWS},
    }


def push_document(pushed: Pushed) -> dict[str, Any]:
    """The document of `reshard push --json`."""
    return {
        "repo": pushed.reference.repo,
        "revision": pushed.reference.revision,
        "commit": pushed.commit,
        "pull_request": pushed.pull_request,
        "set_id": pushed.manifest.set_id,
        "pp_size": pushed.manifest.pp_size,
        "present": list(pushed.manifest.present),
        "changed": pushed.changed,
        "added": pushed.added,
        "added_bytes": pushed.added_bytes,
        "copied": pushed.copied,
        "deleted": pushed.deleted,
        "notes": list(pushed.notes),
    }


def node_documents(plan: ReshardPlan, nodes: int) -> list[dict[str, Any]]:
    """What each of `nodes` nodes would hold: its stages, replicas within a node counted once."""
    documents = []
    for node, stages in enumerate(share_stages(plan.pp_size, nodes)):
        files = {file.name: file for stage in stages for file in plan.stages[stage].files}
        nbytes = sum(file.tensor_bytes for file in files.values())
        documents.append({"node": node, "stages": list(stages), "bytes": nbytes})
    return documents


HOWS = ("written", "fetched", "linked", "reflinked", "copied", "reused")


def _set_document(
    engine: str,
    stages: Sequence[StageRecord],
    excluded: Sequence[Exclusion],
    model: ModelFacts,
    origin: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "pp_size": len(stages),
        "engine": engine,
        "layers": [stage.end_layer - stage.start_layer for stage in stages],
        "stages": [_stage_document(stage) for stage in stages],
        "placement": _placement(stages),
        "replicated": [
            {"component": kind, "stage": stage.stage, "bytes": component_bytes(stage)[kind]}
            for stage in stages
            for kind in stage.replicas
        ],
        "excluded": [
            {"kind": e.kind, "name": e.name, "tensors": e.tensors, "bytes": e.bytes}
            for e in excluded
        ],
        "source": {
            "repo": origin.get("repo"),
            "commit": origin.get("commit"),
            "model_type": model.model_type,
            "tensors": model.tensors + sum(e.tensors for e in excluded),
            "bytes": model.bytes + sum(e.bytes for e in excluded),
        },
    }


def _placement(stages: Sequence[StageRecord]) -> list[dict[str, Any]]:
    """Each component once, with the stages that hold it."""
    placed: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for stage in stages:
        for file in stage.files:
            key = component_key(file.component)
            entry = placed.setdefault(
                key, {"component": key, "tensors": 0, "bytes": 0, "stages": []}
            )
            if file.name not in seen:
                seen.add(file.name)
                entry["tensors"] += file.tensors
                entry["bytes"] += file.tensor_bytes
            if stage.stage not in entry["stages"]:
                entry["stages"].append(stage.stage)
    return [placed[key] for key in COMPONENT_KEYS if key in placed]


def _stage_document(stage: StageRecord) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "start_layer": stage.start_layer,
        "end_layer": stage.end_layer,
        "tensors": sum(file.tensors for file in stage.files),
        "bytes": sum(file.tensor_bytes for file in stage.files),
        "components": component_bytes(stage),
        "files": [
            {"name": file.name, "bytes": file.bytes, "tensors": file.tensors}
            for file in stage.files
        ],
    }


def component_bytes(stage: StageRecord) -> dict[str, int]:
    """Tensor bytes of a stage by component, all its layers together."""
    nbytes: dict[str, int] = {}
    for file in stage.files:
        key = component_key(file.component)
        nbytes[key] = nbytes.get(key, 0) + file.tensor_bytes
    return nbytes
