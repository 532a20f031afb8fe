"""Every error that reshard raises on purpose; operating-system errors become one of them."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_QUOTED_LENGTH = 120


class ReshardError(Exception):
    """Base of all errors: a message that names what is wrong and, mostly, a next step."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ReshardError):
    """The arguments do not fit together or do not fit the checkpoint; nothing was touched."""

    exit_code = 2


class HeaderError(ReshardError):
    """A file is not a valid safetensors file."""


class CheckpointError(ReshardError):
    """The checkpoint is incomplete or contradicts itself."""


class UnsupportedModelError(CheckpointError):
    """The model family is not one that reshard knows."""


class UnknownTensorError(CheckpointError):
    """The checkpoint holds tensors that belong to no known component."""


class PlanError(ReshardError):
    """The wanted stages cannot be made, or would be silently wrong in the engine."""


class OutputError(ReshardError):
    """The output directory cannot be used for this run."""


class SourceChangedError(ReshardError):
    """A source file is not what it was when it was planned, or when the output was begun."""


class BundleError(ReshardError):
    """A directory is not a usable bundle: manifest missing, invalid, or at odds with the files."""


class LayerNotHereError(ReshardError, KeyError):
    """The layer belongs to another stage, or is dense where experts were asked for."""

    exit_code = 2
    __str__ = ReshardError.__str__  # a KeyError shows its argument quoted


class WeightsError(ReshardError):
    """Weights that the forward cannot run: their shapes contradict config.json, or their format."""


class DeviceError(ReshardError):
    """The device is not there, or has too little memory."""


class HubError(ReshardError):
    """The Hub refused, cannot be reached, or gave something else than what was asked for."""


class HubNotFoundError(HubError):
    """There is no such repository, or it is hidden from this token; or it has no such revision."""

    def __init__(self, message: str, *, hint: str | None = None, repository: bool) -> None:
        """`repository`: what is missing is the repository."""
        super().__init__(message, hint=hint)
        self.repository = repository


class HubUnreachableError(HubError):
    """Nobody answers: no network, or offline mode."""


class HubReplyError(HubError):
    """A reply is not what was asked for: nothing that came with it can be trusted."""


class HubConflictError(HubError):
    """Somebody else changed the repository meanwhile."""


class StorageError(ReshardError):
    """The operating system refused to read or write a file; `errno` is its reason."""

    def __init__(self, message: str, *, hint: str | None = None, errno: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


class Interrupted(ReshardError):
    """The user stopped the work."""

    exit_code = 130


_STORAGE_HINTS = {
    errno.ENOSPC: "free some space or choose another disk, then run the same command again",
    errno.EDQUOT: "your disk quota is used up; free some space, then run the same command again",
    errno.EFBIG: "the file system or a limit of this process (ulimit -f) forbids files of this size",
    errno.EACCES: "check the permissions of the file and of the directories above it",
    errno.EPERM: "check the permissions of the file and of the directories above it",
    errno.EROFS: "the file system is mounted read-only; choose another directory",
    errno.EIO: "the disk reports a hardware error; check the system log before trying again",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOTDIR: "a part of this path is a file",
    errno.EEXIST: "something else is in the way; move it aside",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@contextmanager
def storage_errors(path: object) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"{quoted(str(path))}: {reason}",
            hint=_STORAGE_HINTS.get(error.errno or 0),
            errno=error.errno,
        ) from error


def quoted(name: str) -> str:
    """`name` as it may be shown: cut to a readable length, control characters escaped.

    Names come from files that anybody may have written, and go to terminals.
    """
    if len(name) > _QUOTED_LENGTH:
        name = f"{name[: _QUOTED_LENGTH - 20]}... ({len(name)} characters)"
    return printable(name)


def printable(text: str) -> str:
    """`text` with control characters escaped."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )


def say(message: str) -> None:
    """Print a message to stderr; what is no line end and cannot be printed is escaped."""
    for line in message.split("\n"):
        print(printable(line), file=sys.stderr)


def listed(names: list[str], limit: int = 10) -> str:
    """Up to `limit` names on lines of their own, and how many more there are."""
    lines = [f"\n  {quoted(name)}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"\n  ... and {len(names) - limit} more")
    return "".join(lines)
