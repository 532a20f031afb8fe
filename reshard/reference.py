"""Names of repositories on the Hugging Face Hub, told apart from paths."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import UsageError, quoted

SCHEME = "hf://"
DEFAULT_BRANCH = "main"

_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model repository, `org/name`, and a branch, tag or commit of it (None: the default)."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Read `org/name[@revision]`, with or without `hf://`. Raises `UsageError`."""
        match = _REFERENCE.fullmatch(text.removeprefix(SCHEME))
        if match is None:
            raise UsageError(
                f"{quoted(repr(text))} is not a repository",
                hint="repositories are written org/name, org/name@revision or hf://org/name",
            )
        return cls(match["repo"], match["revision"])

    def at(self, revision: str | None) -> HubReference:
        return HubReference(self.repo, revision)

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_reference(path: str | Path) -> HubReference | None:
    """The repository that an argument names; None where it is a path.

    What exists on this machine is a path, unless it starts with `hf://`.
    """
    if isinstance(path, Path):
        return None
    if path.startswith(SCHEME):
        return HubReference.parse(path)
    if os.path.lexists(path) or not _REFERENCE.fullmatch(path):
        return None
    return HubReference.parse(path)


def shadowed(path: str | Path) -> str | None:
    """What to write for a repository whose name is a path here; None where it cannot be one."""
    if isinstance(path, Path) or path.startswith(SCHEME) or not _REFERENCE.fullmatch(path):
        return None
    return f"this is a directory here; for the repository of that name, write {SCHEME}{path}"
