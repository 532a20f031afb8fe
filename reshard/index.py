"""model.safetensors.index.json: which file holds which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from reshard.errors import CheckpointError, ReshardError
from reshard.source import Source, check_weight_path, read_json
from reshard.strict_json import parse_object, pretty

INDEX_NAME = "model.safetensors.index.json"


class WeightIndex(NamedTuple):
    """Tensor name -> file, and what the file says of the tensors' total bytes (any JSON value)."""

    weight_map: dict[str, str]
    total_size: object


def parse_index(
    raw: bytes, what: str, *, in_set: bool = False, error: type[ReshardError] = CheckpointError
) -> WeightIndex:
    """Parse an index. File names may lie below stage directories if `in_set`.

    Raises `error` for anything but a map of names to acceptable file names.
    """
    document = parse_object(raw, what, error)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise error(f"{what}: weight_map must map names to file names")
    for file in set(weight_map.values()):
        check_weight_path(file, error, what, in_set=in_set)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightIndex(weight_map, total)


def read_index(source: Source) -> WeightIndex | None:
    """The index at the top level of a source, or None where there is none."""
    if INDEX_NAME not in source.files():
        return None
    return parse_index(read_json(source, INDEX_NAME, CheckpointError), INDEX_NAME)


def encode_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The content of an index: names sorted by code points, `total_size` in tensor bytes."""
    ordered = {name: weight_map[name] for name in sorted(weight_map)}
    return pretty({"metadata": {"total_size": total_size}, "weight_map": ordered})
