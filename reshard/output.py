"""The directory that a run writes: who may write it, what is there, how files get their names.

Files appear under their final names complete and durable, or not at all. What a run has finished is
written to a journal, so that a later run of the same plan continues where this one stopped.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reshard.bundle import PARTIAL_NAME
from reshard.errors import OutputError, UsageError, quoted, storage_errors
from reshard.journal import FinishedFile, Journal, open_own
from reshard.manifest import MANIFEST_NAME
from reshard.source import STAGE_DIRECTORY, FileStamp

TEMPORARY = ".reshard-tmp-"
"""How the names of files begin that are still being written."""

_PART = ".part"

_NUMBERS = itertools.count()
_DIRECTORY_MAY_HOLD = {"lost+found"}


def check_apart(out: Path, source: Path) -> None:
    """Raise `OutputError` where `out` is `source`, lies inside it or around it, links resolved."""
    with storage_errors(out):
        out, source = Path(os.path.realpath(out)), Path(os.path.realpath(source))
        for path, other, how in (
            (out, source, "is inside the source"),
            (source, out, "contains the source"),
        ):
            for ancestor in (path, *path.parents):
                if ancestor.exists() and other.exists() and ancestor.samefile(other):
                    how = "is the source itself" if ancestor == path else how
                    raise OutputError(
                        f"{quoted(str(out))} {how}; nothing was written",
                        hint="choose a directory outside the checkpoint",
                    )


def check_usable(out: Path) -> None:
    """Raise `UsageError` unless `out` is new, empty, or an output of reshard."""
    with storage_errors(out):
        if out.is_symlink() and not out.exists():
            raise UsageError(f"{quoted(str(out))} is a broken link")
        if not out.exists():
            return
        if not out.is_dir():
            raise UsageError(f"{quoted(str(out))} is a file, not a directory")
        names = {entry.name for entry in os.scandir(out)}
    if names - _DIRECTORY_MAY_HOLD and not names & {MANIFEST_NAME, PARTIAL_NAME}:
        raise _not_ours(out, names)
    if STAGE_DIRECTORY.fullmatch(out.name) and (out.parent / MANIFEST_NAME).exists():
        raise UsageError(
            f"{quoted(str(out))} is a stage of the set above it", hint="choose a new directory"
        )


def _not_ours(out: Path, names: set[str]) -> UsageError:
    hint = "choose a new directory"
    stages = sorted(filter(STAGE_DIRECTORY.fullmatch, names))
    if stages:
        stage, number = shlex.quote(str(out / stages[0])), int(stages[0].split("-")[1])
        pull = f"reshard pull {stage} NEW --stage {number}"
        hint += f"; or collect its stages, one by one and by links: {pull}"
    return UsageError(
        f"{quoted(str(out))} is not empty, and not an output of reshard: it has no {MANIFEST_NAME}",
        hint=hint,
    )


def check_space(out: Path, needed: int) -> None:
    """Raise `OutputError` where the file system of `out` has less than `needed` bytes free."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    with storage_errors(existing):
        status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise OutputError(
            f"{quoted(str(out))}: {needed:,} bytes are needed, {free:,} are free",
            hint="free some space, choose another disk, or take fewer stages with --stage",
        )


class OutputDirectory:
    """An output while one run holds its lock. Paths are relative to `root`, with `/`."""

    def __init__(self, root: Path, journal: Journal) -> None:
        self.root = root
        self._journal = journal
        self._made: list[Path] = []

    @classmethod
    @contextmanager
    def hold(
        cls, root: Path, begun_as: Mapping[str, Any], begun_from: str | None = None
    ) -> Iterator[OutputDirectory]:
        """Lock `root`, creating it, for a run that `begun_as` identifies.

        `begun_from`: what to tell a run that is another one.

        An unfinished run is continued if it was begun as the same, else refused with `OutputError`;
        so is a second process. When the block ends well, the journal and the lock are removed.
        """
        with locked(root):
            journal = Journal.open(root / PARTIAL_NAME / "journal", begun_as, begun_from)
            output = cls(root, journal)
            remove_temporaries(root)
            if not journal.continued:
                output._remove_parts()
            try:
                yield output
            except BaseException:
                output._leave(done=False)
                raise
            output._leave(done=True)

    def require_fresh(self) -> None:
        """Raise `UsageError` unless this run continues another, or found the directory empty.

        What was seen before the lock was held may have changed since.
        """
        if not self._journal.continued:
            names = set(os.listdir(self.root)) - _DIRECTORY_MAY_HOLD - {PARTIAL_NAME}
            if names:
                raise _not_ours(self.root, names)

    def reusable(self, path: str, size: int, *, checksum: bool) -> FinishedFile | None:
        """The journal's word on a file that was finished and that nobody touched since."""
        finished = self._journal.finished.get(path)
        if finished is None or finished.stamp.size != size:
            return None
        if checksum and finished.sha256 is None:
            return None
        with storage_errors(self.root / path):
            try:
                status = os.lstat(self.root / path)
            except FileNotFoundError:
                return None
        return finished if FileStamp.of(status) == finished.stamp else None

    def record(self, path: str, sha256: str | None) -> None:
        """Write to the journal that a file is finished."""
        with storage_errors(self.root / path):
            stamp = FileStamp.of(os.lstat(self.root / path))
        self._journal.record(path, FinishedFile(sha256, stamp))

    def make_directory(self, directory: str) -> None:
        """Create a directory of the output. A link in its place could lead anywhere: refused."""
        path = self.root / directory
        with storage_errors(path):
            _refuse_link(path)
            if not path.is_dir():
                path.mkdir()
                self._made.append(path)

    @contextmanager
    def create(self, path: str) -> Iterator[Path]:
        """A name for a new file beside `path`; when the block ends well, it is renamed to `path`.

        The block must make the file and its content durable. Otherwise it is removed.
        """
        self._refuse_links_above(path)
        with replacing(self.root / path) as temporary:
            yield temporary

    def partial(self, name: str) -> Path:
        """Where a file is put together that arrives in parts; a later run may continue it."""
        return self.root / PARTIAL_NAME / f"{name}{_PART}"

    def adopt(self, partial: Path, path: str) -> None:
        """Give such a file, complete and durable, its final name."""
        self._refuse_links_above(path)
        with storage_errors(self.root / path):
            os.rename(partial, self.root / path)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file."""
        self._refuse_links_above(path)
        replace_file(self.root / path, content)

    def require_in_place(self, directory: str, sizes: Mapping[str, int]) -> None:
        """Raise `OutputError` unless these files are in a directory: the last look at them."""
        path = self.root / directory
        with storage_errors(path):
            _refuse_link(path)
            for name, size in sizes.items():
                file = path / name
                if not (file.is_file() and not file.is_symlink() and file.stat().st_size == size):
                    raise OutputError(
                        f"{quoted(str(file))} was removed or changed by somebody else",
                        hint="run the same command again",
                    )

    def sync_directory(self, directory: str) -> None:
        """Make the names in a directory durable."""
        path = self.root / directory
        with storage_errors(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _leave(self, *, done: bool) -> None:
        """Drop the journal once it has served, and every trace of a run that finished no file."""
        if done or not (self._journal.finished or self._parts()):
            self._remove_parts()
            self._journal.remove()
            for directory in reversed(self._made):
                with suppress(OSError):  # it holds something by now
                    directory.rmdir()

    def _refuse_links_above(self, path: str) -> None:
        """Somebody may have put a link in the place of a stage directory meanwhile."""
        if "/" in path:
            _refuse_link((self.root / path).parent)

    def _parts(self) -> list[Path]:
        return list((self.root / PARTIAL_NAME).glob(f"*{_PART}"))

    def _remove_parts(self) -> None:
        with storage_errors(self.root):
            for part in self._parts():
                part.unlink()


def remove_temporaries(root: Path) -> None:
    """Remove what a killed run was writing; only for the holder of the lock."""
    with storage_errors(root):
        directories = [root]
        directories += [
            path
            for path in root.iterdir()
            if STAGE_DIRECTORY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]
        for directory in directories:
            for path in directory.glob(f"{TEMPORARY}*"):
                path.unlink()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new name beside `target`; when the block ends well, it is renamed to `target`."""
    temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{next(_NUMBERS)}")
    with storage_errors(target):
        try:
            yield temporary
            os.rename(temporary, target)
        finally:
            # Also after the rename: of two links to one file, rename leaves both.
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def replace_file(target: Path, content: bytes) -> None:
    """Write a small file, durably, in place of what may be there; no old file is written into."""
    with replacing(target) as temporary, open(temporary, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of an output, creating its directory. It is released by death.

    Raises `OutputError` where another process holds it, or the file system knows no locks.
    """
    partial = root / PARTIAL_NAME
    path = partial / "lock"
    made = not root.exists()
    with storage_errors(root):
        while True:
            with suppress(FileExistsError, FileNotFoundError):  # another run is just leaving
                partial.mkdir(parents=True, exist_ok=True)
            _refuse_link(partial)
            try:
                file = open_own(path)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = file.read(200).decode("utf-8", "replace").strip()
                file.close()
                raise _not_locked(root, error, holder) from None
            # A run that ends removes the file: the lock must be on the one that is there now.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                break
            file.close()
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        file.flush()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
            partial.rmdir()  # stays while it holds a journal
            if made:
                root.rmdir()  # stays once it holds anything
        file.close()


def _not_locked(root: Path, error: OSError, holder: str) -> OutputError:
    out = quoted(str(root))
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
        return OutputError(
            f"{out} is being written by another run ({quoted(holder) or 'unknown'})",
            hint="wait for it to end, or stop it",
        )
    return OutputError(
        f"{out}: the file system does not support locks ({error.strerror})",
        hint="write to a local disk and copy the result, or mount the file system with locks",
    )


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OutputError(
            f"{quoted(str(path))} is a link; reshard writes inside its output only",
            hint="remove the link",
        )
