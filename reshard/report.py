"""What verifying a set finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.errors import ReshardError, quoted
from reshard.header import SafetensorsHeader
from reshard.manifest import FileRecord


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with `file`, a path from the verified directory (`.` for the directory)."""

    file: str
    problem: str

    @classmethod
    def of(cls, file: str, error: ReshardError) -> Problem:
        """What an error says of `file`, which it need not name again."""
        return cls(file, error.message.removeprefix(f"{quoted(file)}: "))


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. Counts are of what is present; a replica counts once.

    `unhashed`: weight files whose manifest gives no checksum, so that only their header is proved.
    """

    stages: int
    files: int
    tensors: int
    bytes: int
    unhashed: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def document(self) -> dict[str, Any]:
        """The document of `reshard verify --json`."""
        return {
            "ok": self.ok,
            "stages": self.stages,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "unhashed": self.unhashed,
            "problems": [{"file": p.file, "problem": p.problem} for p in self.problems],
        }


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file in its place, with the header that was proved."""

    path: str
    record: FileRecord
    header: SafetensorsHeader
