"""What the documentation shows is what happens.

* ```console blocks of README.md and docs/ are run: lines that start with `$ ` are commands, the
  lines after one are its standard output. Blocks of one file share a directory and run in order.
  Checkpoints there: a tiny one, also on a Hub on loopback, and the releases that a command names,
  their data left out.
  A line `...` stands for any lines, `...` within a line for any text. Blanks at line ends and
  empty lines before the next command do not count. A command must succeed (`|| echo ...` shows
  that one fails).
* ```python blocks of a file are run as one program.
* The programs of examples/ are run.
* Relative links lead to files and headings that exist.
* Modules are listed from the bottom up.
* Every class of error and every message of one is explained.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import reshard.errors
from reshard import build_plan, open_checkpoint, split, verify
from tests.checkpoints import RELEASES, write_sparse
from tests.conftest import tree
from tests.hub_server import HubServer

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md")])
CHECKPOINT = "tiny-qwen3.5-moe"
REPOSITORY = "Qwen/Qwen3.5-tiny"

_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)
_SCHEME = re.compile(r"[a-z]+:")


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [m["text"] for m in _BLOCK.finditer(text) if m["language"] == language]


def having(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name(page: Path) -> str:
    return page.name


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PATH: `reshard` is that of this checkout, `hf` and `python` are ours."""
    directory = tmp_path_factory.mktemp("bin")
    arguments_of = {
        "reshard": f'"{ROOT / "cli.py"}" ',
        "hf": "-m huggingface_hub.cli.hf ",
        "python": "",
    }
    for tool, arguments in arguments_of.items():
        script = directory / tool
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return directory


@pytest.fixture
def shell(tools: Path, tmp_path: Path, hub: HubServer) -> dict[str, str]:
    """The environment of commands, which run in `tmp_path`, beside a tiny checkpoint.

    Their Hub has the same checkpoint as `REPOSITORY`, and takes what they push.
    """
    make = [sys.executable, str(ROOT / "examples" / "tiny_checkpoint.py"), CHECKPOINT]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    hub.create(REPOSITORY, {**tree(tmp_path / CHECKPOINT)})
    unset = ("RESHARD_DEBUG", "COLUMNS", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    return {
        **environment,
        **hub.environment(tmp_path / "hf-home"),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
    }


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block, with the lines that it should print."""
    command, expected = "", list[str]()
    for line in block.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, expected
            command, expected = line[2:], []
        else:
            assert command, f"output without a command: {line}"
            expected.append(line.rstrip())
    if command:
        yield command, expected


def fits(expected: list[str], printed: list[str]) -> bool:
    """Whether output is as expected, `...` standing for anything."""
    while expected and not expected[-1]:
        expected = expected[:-1]
    pattern = ""
    for line in expected:
        if line == "...":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


def write_releases(names: set[str], directory: Path) -> None:
    """Write released checkpoints at their true size, in files that are mostly holes."""
    for release in sorted(names & RELEASES.keys()):
        try:
            write_sparse(directory / release, release, shards=94)
        except OSError as error:
            pytest.skip(f"the file system of {directory} takes no sparse files: {error}")


@pytest.mark.parametrize("page", having("console"), ids=name)
def test_console_blocks(page: Path, shell: dict[str, str], tmp_path: Path) -> None:
    runs = [run for block in blocks(page, "console") for run in commands(block)]
    write_releases({word for command, _ in runs for word in command.split()}, tmp_path)
    for command, expected in runs:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=shell,
            capture_output=True,
            text=True,
            check=False,
        )
        what = f"$ {command}\n{done.stdout}--- stderr ---\n{done.stderr}"
        assert done.returncode == 0, f"exit status {done.returncode}\n{what}"
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        assert fits(expected, printed), what


@pytest.mark.parametrize("page", having("python"), ids=name)
def test_python_blocks(page: Path, shell: dict[str, str], tmp_path: Path) -> None:
    """Run in a directory where `tiny` is a tiny checkpoint, and `bundles` its set of 4 stages."""
    (tmp_path / CHECKPOINT).rename(tmp_path / "tiny")
    split(build_plan(open_checkpoint(tmp_path / "tiny"), 4), tmp_path / "bundles")
    program = tmp_path / "program.py"
    program.write_text("\n\n".join(blocks(page, "python")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=shell,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


EXAMPLES = {
    "demo.sh": (["demo"], ["demo/bundles", "demo/stage-2"]),
    "split_from_hub.sh": ([REPOSITORY, "4", "2", "out"], ["out/stage-02-of-04"]),
    "push_and_pull.sh": ([REPOSITORY, "org/set", "2", "dir"], ["dir/node0", "dir/node1"]),
    "offline.sh": ([REPOSITORY, "2", "dir"], ["dir/bundles"]),
}
"""Script -> its arguments, and the sets that it makes."""


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.sh")), ids=name)
def test_examples(script: Path, shell: dict[str, str], tmp_path: Path) -> None:
    arguments, made = EXAMPLES[script.name]
    done = subprocess.run(
        ["bash", script, *arguments],
        cwd=tmp_path,
        env=shell,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for directory in made:
        assert verify(tmp_path / directory).ok


PROGRAMS = {
    "load_stage.py": (["out/stage-01-of-02", "--ep", "1/4"], "layer 7: w13 (4, 48, 32)"),
    "forward_stage.py": (
        ["out/stage-01-of-02", "--tokens", "3"],
        "layer 7: (3, 32) torch.bfloat16",
    ),
}
"""Program -> its arguments, and words that it prints."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_programs(program: str, shell: dict[str, str], tmp_path: Path) -> None:
    split(build_plan(open_checkpoint(tmp_path / CHECKPOINT), 2), tmp_path / "out")
    arguments, words = PROGRAMS[program]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / program, *arguments],
        cwd=tmp_path,
        env=shell,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for match in _HEADING.finditer(text):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["title"]).lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        number = 0
        while (numbered := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(numbered)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in (match["target"] for match in _LINK.finditer(text)):
        if _SCHEME.match(target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


def test_modules_are_listed_from_the_bottom_up() -> None:
    """A module imports only from those above it in the table of architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| module |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    package = ROOT / "reshard"
    modules = {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    del modules["__init__"], modules["runtime"]  # they only gather the names of others
    assert sorted(listed) == sorted(modules)
    for number, module in enumerate(listed):
        nodes = ast.walk(ast.parse(modules[module].read_text(encoding="utf-8")))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        below = {name for name in listed[number:] if f"reshard.{name}" in names}
        assert not below, f"{module} imports {below}"


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_error_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = [match["title"] for match in _HEADING.finditer(text)]
    errors = [
        e for e in subclasses(reshard.errors.ReshardError) if e.__module__ == "reshard.errors"
    ]
    assert errors
    for error in errors:
        assert any(error.__name__ in heading for heading in headings), error.__name__


def texts(node: ast.expr) -> Iterator[str]:
    """The fixed parts of a message: a string, an f-string or a sum of them."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def messages() -> Iterator[tuple[str, str]]:
    """Where the code makes an error or a problem, and the longest fixed part of its message."""
    for path in sorted((ROOT / "reshard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            maker = ast.unparse(node.func).rpartition(".")[2]
            if not (maker.endswith("Error") or maker in ("error", "fault", "check", "Problem")):
                continue
            if maker == "AssertionError":  # not for people
                continue
            place = 1 if maker in ("check", "Problem") else 0
            found = list(texts(node.args[place])) if len(node.args) > place else []
            if found:
                yield f"{path.name}:{node.lineno}", max(found, key=len)


def words(text: str) -> str:
    return " ".join(text.replace("`", " ").split())


def test_every_message_is_explained() -> None:
    page = words((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    found = list(messages())
    assert len(found) > 100
    missing = [f"{at}: {text}" for at, text in found if words(text).strip(" :;,()") not in page]
    assert not missing, "\n".join(missing)
