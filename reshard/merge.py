"""Turning a set back into one ordinary checkpoint: one file per layer and component, flat."""

from __future__ import annotations

from pathlib import Path

from reshard.bundle import PARTIAL_NAME, BundleSet
from reshard.copy import bundle_task, run_tasks
from reshard.errors import OutputError, quoted, storage_errors
from reshard.finish import Outcome, finish_directory, index_of, side_bytes
from reshard.index import INDEX_NAME, encode_index
from reshard.manifest import MANIFEST_NAME
from reshard.output import OutputDirectory, check_apart, check_usable
from reshard.progress import Progress, Silent
from reshard.source import LocalSource


def merge(
    out: str | Path,
    dest: str | Path,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Write every tensor of the set `out` once into the directory `dest`: an ordinary checkpoint.

    Files are linked where the file system allows it, else copied and checked. What the set
    excluded stays excluded. Raises `BundleError` where a stage or a file is missing or is not what
    the manifest says; `UsageError` and `OutputError` where `dest` cannot be used; `StorageError`.
    """
    bundle = BundleSet.open(Path(out))
    bundle.check_side_files()
    root = Path(dest)
    check_apart(root, bundle.root)
    bundle.require_all_stages("a merge")
    records = bundle.manifest.files()
    if not (root / PARTIAL_NAME).exists() and _is_merged(root, bundle):
        return Outcome(root, bundle.manifest)
    check_usable(root)
    begun_as = {"command": "merge", "set": bundle.manifest.set_id}
    with OutputDirectory.hold(root, begun_as) as output:
        if (root / MANIFEST_NAME).exists():
            raise OutputError(
                f"{quoted(str(root))} is a set of bundles", hint="choose a new directory"
            )
        if not _is_merged(root, bundle):
            output.require_fresh()
        done = run_tasks(
            [bundle_task(bundle, name, name) for name in records],
            source=bundle.source,
            output=output,
            jobs=jobs,
            checksums=False,
            progress=progress or Silent(),
            label="merge",
            more_bytes=side_bytes(bundle.manifest),
        )
        index = index_of(LocalSource(root), records)
        finish_directory(output, "", bundle.source, bundle.manifest, *index, with_manifest=False)
    return Outcome.of(root, bundle.manifest, done)


def _is_merged(root: Path, bundle: BundleSet) -> bool:
    """Whether `root` holds this very set merged: nothing is left to do then."""
    with storage_errors(root):
        index = root / INDEX_NAME
        names = bundle.manifest.files()
        if not index.is_file() or not all((root / name).is_file() for name in names):
            return False
        source = LocalSource(root)
        sizes = {name: record.bytes for name, record in names.items()}
        sizes |= {side.name: side.bytes for side in bundle.manifest.side_files}
        if any(
            name not in source.files() or source.stamp(name).size != n for name, n in sizes.items()
        ):
            return False
        return index.read_bytes() == encode_index(*index_of(source, names))
