"""What tests share: the command line, run in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

# Before anything imports huggingface_hub: no test speaks to the Hub, or to somebody's cache.
os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent/huggingface"}
for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(name, None)

# Before anything imports triton: kernels run in its interpreter, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

from reshard.cli import main
from tests.hub_server import HubServer

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small tensors: threads would only wait for each other, long on a busy machine."""
    import torch  # most tests have no use for it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub on loopback, empty."""
    with HubServer(tmp_path / "hub-storage") as server:
        yield server


@dataclass(frozen=True)
class Online:
    """`reshard` in processes of its own, which speak to the Hub of a test.

    `home` is their HF_HOME; keyword arguments are environment variables, None to unset one.
    """

    hub: HubServer
    home: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def __call__(self, *arguments: object, **variables: str | None) -> Result:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)

    def start(self, *arguments: object, **variables: str | None) -> subprocess.Popen[str]:
        changed = {**self.hub.environment(self.home), "COLUMNS": "200", **variables}
        kept = {name: value for name, value in os.environ.items() if name not in changed}
        process = subprocess.Popen(
            [Path(sys.executable).parent / "reshard", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | {name: value for name, value in changed.items() if value is not None},
        )
        self.running.append(process)
        return process


@pytest.fixture
def online(hub: HubServer, tmp_path: Path) -> Iterator[Online]:
    """Run `reshard` against the Hub of the test; what still runs at the end is killed."""
    runner = Online(hub, tmp_path / "hf-home")
    yield runner
    for process in runner.running:
        process.kill()
        process.communicate()


def together(online: Online, *commands: Sequence[object], **variables: str | None) -> list[Result]:
    """The results of commands that have nothing to do with each other."""
    processes = [online.start(*command, **variables) for command in commands]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        results.append(Result(process.returncode, out, err))
    return results


def refused(result: Result, *words: str, hint: bool = True) -> None:
    """It ended with an error that says this, and what to do; not with a traceback."""
    assert result.code == 1, result.err
    assert "error: " in result.err and "Traceback" not in result.err, result.err
    assert not hint or "\nhint: " in f"\n{result.err}", result.err
    for word in words:
        assert word in result.err, result.err


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def published(out: Path) -> dict[str, bytes]:
    """What a repository holds of a set, given its root: all of it but what is of this machine."""
    files = tree(out)
    document = json.loads(files["reshard.json"])
    del document["local"]
    files["reshard.json"] = f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode()
    return files
