"""What a run writes beside the weights, in the order that makes it safe, and what it reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.bundle import checked_header, prefix_of
from reshard.copy import write_pieces
from reshard.errors import SourceChangedError, quoted
from reshard.index import INDEX_NAME, encode_index
from reshard.manifest import MANIFEST_NAME, FileRecord, Manifest
from reshard.output import OutputDirectory
from reshard.source import LocalSource, Range, Source
from reshard.tasks import FinishedTask


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did: the set as the directory `root` now shows it, and how its files came about.

    `counts` maps `written`, `fetched`, `linked`, `reflinked`, `copied` and `reused` to numbers of weight
    files. `changed` is false where everything was there already.
    """

    root: Path
    manifest: Manifest
    counts: Mapping[str, int] = field(default_factory=Counter)
    changed: bool = False

    @classmethod
    def of(cls, root: Path, manifest: Manifest, tasks: Iterable[FinishedTask]) -> Outcome:
        return cls(root, manifest, Counter(task.how for task in tasks), changed=True)


def side_bytes(manifest: Manifest, directories: int = 1) -> int:
    """What `finish_directory` will write, all but, into so many directories."""
    return directories * sum(side.bytes for side in manifest.side_files)


def finish_directory(
    output: OutputDirectory,
    directory: str,
    source: Source,
    manifest: Manifest,
    weight_map: Mapping[str, str],
    total_size: int,
    *,
    with_manifest: bool = True,
) -> None:
    """Side files, then the index, then the manifest, each durable before the next.

    Side files are copies, never links: people edit them in place. Raises `SourceChangedError`
    where one is not what the manifest says any more.
    """
    prefix = prefix_of(directory)
    for side in manifest.side_files:
        pieces = source.read_many([Range(side.name, 0, side.bytes)])
        changed = SourceChangedError(
            f"{quoted(side.name)} changed since it was planned", hint="run the command again"
        )
        write_pieces(prefix + side.name, pieces, output, True, (side.sha256, changed))
    output.write(prefix + INDEX_NAME, encode_index(weight_map, total_size))
    output.sync_directory(directory)
    if with_manifest:
        output.write(prefix + MANIFEST_NAME, manifest.to_bytes())
        output.sync_directory(directory)


def index_of(source: LocalSource, records: Mapping[str, FileRecord]) -> tuple[dict[str, str], int]:
    """The weight map and total size of files that lie flat in `source`.

    Raises `BundleError` where one is not the file that its record describes.
    """
    weight_map: dict[str, str] = {}
    for name, record in records.items():
        header = checked_header(source, name, record)
        weight_map |= {tensor.name: name for tensor in header.tensors}
    return weight_map, sum(record.tensor_bytes for record in records.values())
