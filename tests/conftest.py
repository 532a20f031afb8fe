"""What tests share: the command line, run in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

# Before anything imports huggingface_hub: no test speaks to the Hub, or to somebody's cache.
os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent/huggingface"}
for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(name, None)

from reshard.cli import main

REPOSITORY = Path(__file__).parent.parent

settings.register_profile("reshard", deadline=None)
settings.load_profile("reshard")


class Result(NamedTuple):
    """How a run of the command line ended, and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `reshard` with arguments in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["reshard", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `reshard` in a process of its own; what still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, REPOSITORY / "cli.py", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
