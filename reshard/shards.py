"""Which tensors a directory of safetensors files holds, and which file each is read from.

The index decides. Weights beside it are never dropped in silence; docs/checkpoints.md has the
rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reshard.config import ModelConfig
from reshard.errors import (
    CheckpointError,
    HeaderError,
    UnknownTensorError,
    UsageError,
    listed,
    quoted,
)
from reshard.header import DTYPE_BITS, SafetensorsHeader, TensorInfo
from reshard.index import INDEX_NAME, WeightIndex, read_index
from reshard.layout import ExpertForms
from reshard.names import component_of, natural_key
from reshard.source import WEIGHT_SUFFIXES, Source, is_plain_name, read_header

_SHARD_OF = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.safetensors")
_FOREIGN_FORMATS = ("mlx", "flax", "tf")


@dataclass(slots=True)
class Shards:
    """The tensors found, by name; the headers of the files that they are read from; what was odd.

    `left_out`: tensors that no index lists and no component knows.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    headers: list[SafetensorsHeader] = field(default_factory=list)
    left_out: list[TensorInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, tensor: TensorInfo) -> None:
        """Take a tensor. Raises `CheckpointError` where another file gave one of its name."""
        known = self.tensors.setdefault(tensor.name, tensor)
        if known is not tensor:
            raise CheckpointError(
                f"{quoted(tensor.name)} is in two files, {quoted(known.file)} and "
                f"{quoted(tensor.file)}, and no index says which one counts",
                hint="remove one of the files, or leave it out with --ignore-file",
            )


def read_shards(
    source: Source,
    config: ModelConfig,
    include_files: Sequence[str] = (),
    ignore_files: Sequence[str] = (),
) -> Shards:
    """Find every tensor of a checkpoint that is no output of reshard.

    `include_files`, `ignore_files`: unindexed files of the top level to take what is new from, or
    to leave alone. Raises `CheckpointError` where files are missing or contradict each other,
    `HeaderError` for a broken file, `UnknownTensorError` for tensors that belong nowhere,
    `UsageError` for an option that names no unindexed file.
    """
    index = read_index(source)
    # A directory of that name is no weight file either; reading it will say so.
    entries = source.files() if index else (*source.files(), *source.directories())
    weights = sorted((f for f in entries if f.endswith(".safetensors")), key=natural_key)
    for file in entries:
        odd = file.lower().endswith(".safetensors") and not file.endswith(".safetensors")
        if odd or (file in weights and not is_plain_name(file)):
            raise CheckpointError(
                f"{quoted(file)}: a weight file of this name would be overlooked or could not be named",
                hint="rename it, with the ending .safetensors, or move it away",
            )
    indexed = set(index.weight_map.values()) if index else set()
    for file in (*include_files, *ignore_files):
        if file not in weights or file in indexed:
            what = "is named by the index" if file in indexed else "is no file of the checkpoint"
            raise UsageError(
                f"{quoted(file)} {what}",
                hint="--include-file and --ignore-file take .safetensors files beside the index",
            )
    shards = Shards()
    unindexed = [f for f in weights if f not in indexed and f not in ignore_files]
    if index is None:
        _read_all(source, unindexed, shards)
    else:
        _read_indexed(source, index, shards, config)
        for file in unindexed:
            _read_unindexed(source, file, shards, config, indexed, file in include_files)
    _require_known(shards.tensors, config)
    _check_formats(shards)
    if index is not None:
        _check_total_size(index, shards)
    return shards


def _read_all(source: Source, files: Sequence[str], shards: Shards) -> None:
    """Without an index, every file counts."""
    if not files:
        others = [f for f in source.files() if f.endswith(WEIGHT_SUFFIXES)]
        raise CheckpointError(
            "there are no safetensors files here"
            + (f", only {quoted(others[0])}" if others else ""),
            hint="reshard reads safetensors checkpoints only; save or download the model as such",
        )
    present = set(files)
    series = {(m["stem"], m["total"]) for f in files if (m := _SHARD_OF.fullmatch(f))}
    for stem, total in sorted(series):
        names = (f"{stem}-{n:05d}-of-{total}.safetensors" for n in range(1, int(total) + 1))
        _require_files([name for name in names if name not in present])
    source.prefetch_headers(files)
    for file in files:
        header = read_header(source, file)
        shards.headers.append(header)
        for tensor in header.tensors:
            shards.add(tensor)
    if len(files) > 1:
        shards.warnings.append(f"there is no {INDEX_NAME}; all {len(files)} files were read")


def _read_indexed(source: Source, index: WeightIndex, shards: Shards, config: ModelConfig) -> None:
    """The files that the index names. Takes the names that it finds out of `index.weight_map`."""
    weight_map = index.weight_map
    files = sorted(set(weight_map.values()), key=natural_key)
    present = {*source.files(), *source.directories()}
    _require_files([file for file in files if file not in present])
    _require_distinct(source, files)
    unlisted: list[TensorInfo] = []
    source.prefetch_headers(files)
    for file in files:
        header = read_header(source, file)
        shards.headers.append(header)
        repeats = 0
        for tensor in header.tensors:
            if tensor.name in shards.tensors:
                repeats += 1
            elif (listed_in := weight_map.get(tensor.name)) is None:
                unlisted.append(tensor)
            elif listed_in == file:
                shards.tensors[tensor.name] = tensor
                del weight_map[tensor.name]
            else:
                repeats += 1
        if repeats:
            shards.warnings.append(
                f"{quoted(file)}: {repeats} tensors are left alone, the index lists them elsewhere"
            )
    if weight_map:
        name, file = next(iter(weight_map.items()))
        raise CheckpointError(
            f"the index lists {quoted(name)} in {quoted(file)}, which does not hold it "
            f"({len(weight_map)} tensors are missing so)",
            hint="download the checkpoint again, or rebuild its index",
        )
    _take_unlisted(unlisted, shards, config)


def _take_unlisted(unlisted: list[TensorInfo], shards: Shards, config: ModelConfig) -> None:
    """Tensors that no index lists: the known ones are taken, the others left out, both aloud."""
    foreign = [t for t in unlisted if component_of(t.name, config) is None]
    known = [t for t in unlisted if component_of(t.name, config) is not None]
    for tensor in known:
        shards.add(tensor)
    if known:
        shards.warnings.append(
            f"{len(known)} tensors that the index does not list are included, "
            f"such as {quoted(known[0].name)} of {quoted(known[0].file)}"
        )
    shards.left_out += foreign
    if foreign:
        shards.warnings.append(
            f"{len(foreign)} unknown tensors that the index does not list are left out, "
            f"such as {quoted(foreign[0].name)} of {quoted(foreign[0].file)}"
        )


def _read_unindexed(
    source: Source,
    file: str,
    shards: Shards,
    config: ModelConfig,
    indexed: set[str],
    include: bool,
) -> None:
    """A weight file beside the index: part of the model, plainly none of it, or a refusal."""
    cure = f"decide with --include-file {quoted(file)} or --ignore-file {quoted(file)}"
    try:
        header = read_header(source, file)
    except HeaderError as error:
        raise HeaderError(
            f"{error.message} (the index does not name this file)",
            hint=f"leave it out with --ignore-file {quoted(file)}, or repair it",
        ) from None
    repeats = [t for t in header.tensors if t.name in shards.tensors]
    for tensor in repeats:
        if shards.tensors[tensor.name].file not in indexed:
            shards.add(tensor)  # refuses: two unindexed files hold it
    new = [t for t in header.tensors if t.name not in shards.tensors]
    known = [t for t in new if component_of(t.name, config) is not None]
    if not known and not (repeats and new):
        what = "repeats tensors of other files" if repeats else "holds no tensor of the model"
        shards.notes.append(
            f"{quoted(file)} is not read: it {what}, and the index does not name it"
        )
        return
    clash = ExpertForms.of(shards.tensors.values()).clash(ExpertForms.of(known))
    if clash is not None:
        raise CheckpointError(
            f"{quoted(file)}, which the index does not name, would give {quoted(clash)} "
            "both fused and per-expert tensors",
            hint=f"leave it out with --ignore-file {quoted(file)}",
        )
    mixture = len(known) < len(header.tensors)
    if mixture and not include:
        raise CheckpointError(
            f"{quoted(file)}, which the index does not name, holds {len(known)} new tensors of the "
            f"model, {len(repeats)} that repeat others and {len(new) - len(known)} unknown ones",
            hint=cure,
        )
    shards.headers.append(header)
    if mixture:
        _take_unlisted(new, shards, config)
        return
    for tensor in known:
        shards.add(tensor)
    shards.notes.append(
        f"{quoted(file)}: the index does not name it; its {len(known)} tensors are new and included"
    )


def _require_files(missing: list[str]) -> None:
    if missing:
        raise CheckpointError(
            f"{len(missing)} weight files of the checkpoint are missing:{listed(missing)}",
            hint="download them again; if the files were renamed, rebuild the index",
        )


def _require_distinct(source: Source, files: Iterable[str]) -> None:
    """On a file system that folds case, two names of an index can be one file."""
    folded: dict[str, str] = {}
    for file in files:
        other = folded.setdefault(file.casefold(), file)
        if other == file or source.local_path(file) is None:
            continue
        if source.stamp(other) == source.stamp(file):
            raise CheckpointError(
                f"the index names {quoted(other)} and {quoted(file)}, which are the same file here",
                hint="copy the checkpoint to a case-sensitive file system",
            )


def _require_known(tensors: Iterable[str], config: ModelConfig) -> None:
    unknown = [name for name in tensors if component_of(name, config) is None]
    if not unknown:
        return
    family = config.family
    known = [f"{family.language_prefix}{{embed_tokens,layers.<n>,norm}}.*", "lm_head.*"]
    known += ["model.visual.*"] if family.has_visual else []
    known += ["mtp.*"] if family.has_mtp else []
    raise UnknownTensorError(
        f"{len(unknown)} tensors belong to no part of {config.model_type} with "
        f"{config.num_hidden_layers} layers:{listed(sorted(unknown, key=natural_key))}",
        hint=f"known names are {', '.join(known)}; files beside the model can be left out "
        "with --ignore-file",
    )


def _check_formats(shards: Shards) -> None:
    for header in shards.headers:
        written_by = header.metadata.get("format")
        if written_by in _FOREIGN_FORMATS:
            raise CheckpointError(
                f"{quoted(header.file)}: its metadata says format {written_by}, whose tensors "
                "are laid out for another framework",
                hint="use the checkpoint that was saved for PyTorch (format pt)",
            )
    odd = {t.dtype: t.name for t in shards.tensors.values() if t.dtype not in DTYPE_BITS}
    for dtype, name in sorted(odd.items()):
        shards.warnings.append(
            f"dtype {quoted(dtype)} (of {quoted(name)}) is not known; its bytes are copied as they are"
        )


def _check_total_size(index: WeightIndex, shards: Shards) -> None:
    total = sum(tensor.nbytes for tensor in shards.tensors.values())
    if index.total_size is None:
        shards.notes.append(f"the index gives no total_size; the tensors take {total:,} bytes")
    elif index.total_size != total:
        shards.warnings.append(
            f"the index gives total_size {quoted(repr(index.total_size))}, "
            f"the tensors take {total:,} bytes"
        )
