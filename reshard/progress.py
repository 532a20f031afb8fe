"""How long work reports what it has done."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of every piece of work. Methods are called from several threads."""

    def start(self, label: str, total_bytes: int) -> None:
        """A phase of work begins: `label` says which, `total_bytes` how much it will move."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""

    def finish_file(self, path: str, how: str) -> None:
        """A file is done: `written`, `fetched`, `linked`, `reflinked`, `copied`, `reused`, `added` or `checked`."""


class Silent:
    """Reports nothing."""

    def start(self, label: str, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def finish_file(self, path: str, how: str) -> None: ...
