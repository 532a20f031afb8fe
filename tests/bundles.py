"""Sets of bundles that tests load: split from tiny checkpoints, compared as bytes, made anew by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from reshard import build_plan, open_checkpoint, split
from reshard.header import TensorInfo, encode_header
from reshard.manifest import FileRecord, Manifest
from tests.checkpoints import Blob, build

Content = tuple[torch.dtype, tuple[int, ...], bytes]
"""A tensor of torch: dtype, shape and raw bytes."""


def make_set(
    path: Path,
    family: str = "qwen3_5_moe",
    *,
    stages: int = 2,
    checksums: bool = True,
    **model: Any,
) -> Path:
    """Split a tiny checkpoint, `path/in`, into `path/out`, and return that.

    Of Qwen3-VL, the layers that take vision features may not be parted: only the first does here.
    """
    if family.startswith("qwen3_vl"):
        model.setdefault("vision_deepstack_visual_indexes", (0,))
    build(path / "in", family, **model)
    split(build_plan(open_checkpoint(path / "in"), stages), path / "out", checksums=checksums)
    return path / "out"


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, in the order of its elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(tensors: Mapping[str, Tensor]) -> dict[str, Content]:
    return {name: (t.dtype, tuple(t.shape), raw(t)) for name, t in tensors.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """One number for all that `contents` says."""
    return hashlib.sha256(repr(sorted(contents(tensors).items())).encode()).hexdigest()


def library(directory: Path) -> dict[str, Content]:
    """All tensors of a directory's weight files, as the safetensors library loads them."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: content for file in files for name, content in contents(load_file(file)).items()}


def manifest_of(directory: Path) -> Manifest:
    return Manifest.parse((directory / "reshard.json").read_bytes(), "reshard.json")


def rewrite(
    directory: Path,
    files: Mapping[str, Mapping[str, Blob]],
    *,
    remove: Collection[str] = (),
    **facts: Any,
) -> None:
    """Give a stage directory other weight files, and a manifest that vouches for them.

    files: name -> tensors, which come in this order, whatever the format says. facts: what the
    manifest says of these files that is not so.
    """
    manifest = manifest_of(directory)
    (stage,) = manifest.present
    records = {record.name: record for record in manifest.stages[stage].files}
    for name in remove:
        (directory / name).unlink()
        del records[name]
    for name, tensors in files.items():
        header = encode_header(_infos(tensors))
        data = header + b"".join(data for _, _, data in tensors.values())
        (directory / name).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        header_sha256 = hashlib.sha256(header).hexdigest()
        size = len(data) - len(header)
        record = FileRecord(name, len(data), size, len(tensors), header_sha256, sha256)
        records[name] = replace(record, **facts)
    stages = [
        replace(s, files=tuple(records.values())) if s.stage == stage else s
        for s in manifest.stages
    ]
    manifest = replace(manifest, stages=tuple(stages))
    (directory / "reshard.json").write_bytes(manifest.to_bytes())


def _infos(tensors: Mapping[str, Blob]) -> Iterable[TensorInfo]:
    for name, (dtype, shape, data) in tensors.items():
        yield TensorInfo(name, dtype, shape, 0, len(data), "")
