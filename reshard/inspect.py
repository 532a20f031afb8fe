"""What a checkpoint or a set holds, in a few facts; and whether its files are the published ones."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event
from typing import Any

from reshard.checkpoint import Checkpoint
from reshard.errors import CheckpointError
from reshard.names import component_key
from reshard.progress import Progress, Silent
from reshard.report import Problem
from reshard.source import Range, sha256_of
from reshard.tasks import default_jobs, in_parallel, watched


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """The document of `reshard inspect --json`; docs/json.md describes it."""
    config, layouts = checkpoint.config, checkpoint.layouts
    components: dict[str, dict[str, int]] = {}
    for component, tensors in checkpoint.components.items():
        entry = components.setdefault(component_key(component), {"tensors": 0, "bytes": 0})
        entry["tensors"] += len(tensors)
        entry["bytes"] += sum(tensor.nbytes for tensor in tensors)
    incomplete = tuple(f"incomplete: {gap}" for gap in checkpoint.gaps)
    origin = checkpoint.source.origin
    return {
        "repo": origin.get("repo"),
        "commit": origin.get("commit"),
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "num_experts": config.num_experts,
        "expert_layout": layouts.of(mtp=False),
        "mtp_expert_layout": layouts.of(mtp=True),
        "quant_method": config.quant_method,
        "tied": config.tied,
        "tensors": checkpoint.tensor_count,
        "bytes": checkpoint.tensor_bytes,
        "components": components,
        "set": _set_facts(checkpoint),
        "warnings": [*checkpoint.warnings, *incomplete],
        "notes": list(checkpoint.notes),
    }


def _set_facts(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What an output of reshard says of itself; None for any other checkpoint."""
    if checkpoint.bundle is None:
        return None
    manifest = checkpoint.bundle.manifest
    return {
        "set_id": manifest.set_id,
        "pp_size": manifest.pp_size,
        "present": list(manifest.present),
        "layers": list(manifest.partition.layers),
        "partition": manifest.partition.rule,
        "engine": manifest.engine.name,
        "engine_version": manifest.engine.version,
        "source_repo": manifest.source.repo,
        "source_commit": manifest.source.commit,
        "excluded": [exclusion.name for exclusion in manifest.excluded],
    }


@dataclass(frozen=True, slots=True)
class HashReport:
    """How many weight files have their published checksum, and which have not."""

    checked: int
    unknown: int
    problems: tuple[Problem, ...]


def check_hashes(
    checkpoint: Checkpoint, *, jobs: int | None = None, progress: Progress | None = None
) -> HashReport:
    """Hash the weight files and compare with what is on record.

    That is the manifest for a set, and for a Hugging Face cache the names of its blobs. Raises
    `CheckpointError` where no checksum is on record at all, or no file is on this machine.
    """
    source = checkpoint.source
    if all(source.local_path(header.file) is None for header in checkpoint.headers):
        raise CheckpointError(
            "none of these files is on this machine, so there is nothing to hash",
            hint="download the checkpoint into the cache first: hf download ORG/NAME",
        )
    expected = {
        header.file: _recorded_sha256(checkpoint, header.file) for header in checkpoint.headers
    }
    known = {
        file: sha256
        for file, sha256 in expected.items()
        if sha256 is not None and source.local_path(file) is not None
    }
    if not known:
        raise CheckpointError(
            "no checksums are on record for these files",
            hint="only a Hugging Face cache snapshot and an output of reshard record them",
        )
    progress = progress or Silent()
    progress.start("hash", sum(source.stamp(file).size for file in known))

    def matches(file: str, stop: Event) -> Problem | None:
        whole = Range(file, 0, source.stamp(file).size)
        sha256 = sha256_of(watched(source.read_many([whole]), stop, progress))
        progress.finish_file(file, "checked")
        if sha256 == known[file]:
            return None
        return Problem(file, f"sha256 is {sha256}, published was {known[file]}")

    found = in_parallel(matches, known, jobs or default_jobs())
    problems = sorted((p for p in found if p is not None), key=lambda p: p.file)
    return HashReport(len(known), len(expected) - len(known), tuple(problems))


def _recorded_sha256(checkpoint: Checkpoint, file: str) -> str | None:
    if checkpoint.bundle is None:
        return checkpoint.source.published_sha256(file)
    record = checkpoint.bundle.manifest.files().get(file.rpartition("/")[2])
    return record.sha256 if record else None
