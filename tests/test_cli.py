"""The command line: documents, tables, messages, exit codes, and what goes to which stream."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build, read_dir
from tests.conftest import REPOSITORY, Cli


def test_plan_document(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", mtp="fused")
    result = cli("plan", source, "--pp-size", 3, "--exclude", "visual", "--json")
    document: dict[str, Any] = json.loads(result.out)
    assert list(document) == [
        "pp_size", "engine", "layers", "stages", "placement", "replicated", "excluded", "source",
        "warnings", "notes",
    ]  # fmt: skip
    assert (document["pp_size"], document["engine"]) == (3, "sglang")
    assert document["layers"] == [2, 3, 3]
    original = read_dir(source)
    sizes = {name: len(tensor[2]) for name, tensor in original.items()}
    assert document["source"] == {
        "repo": None,
        "commit": None,
        "model_type": "qwen3_5_moe",
        "tensors": len(original),
        "bytes": sum(sizes.values()),
    }
    visual = [size for name, size in sizes.items() if name.startswith("model.visual.")]
    excluded = {"kind": "component", "name": "visual", "tensors": len(visual), "bytes": sum(visual)}
    assert document["excluded"] == [excluded]
    embed = sizes["model.language_model.embed_tokens.weight"]
    assert document["placement"][0] == {
        "component": "embed",
        "tensors": 1,
        "bytes": embed,
        "stages": [0, 2],
    }
    assert [place["stages"] for place in document["placement"][1:]] == [[0, 1, 2], [2], [2]]
    assert document["replicated"] == [{"component": "embed", "stage": 2, "bytes": embed}]
    assert document["warnings"] == []
    first, _, last = document["stages"]
    assert list(first) == [
        "stage", "start_layer", "end_layer", "tensors", "bytes", "components", "files",
    ]  # fmt: skip
    assert (first["stage"], first["start_layer"], first["end_layer"]) == (0, 0, 2)
    assert list(first["components"]) == ["embed", "layers"]
    assert list(last["components"]) == ["embed", "layers", "head", "mtp"]
    assert last["components"]["embed"] == embed
    for stage in document["stages"]:
        assert stage["bytes"] == sum(stage["components"].values())
        assert stage["tensors"] == sum(file["tensors"] for file in stage["files"])
    assert [file["name"] for file in last["files"]] == [
        "model-embed.safetensors",
        "model-layer-00005.safetensors",
        "model-layer-00006.safetensors",
        "model-layer-00007.safetensors",
        "model-head.safetensors",
        "model-mtp.safetensors",
    ]
    assert all(list(file) == ["name", "bytes", "tensors"] for file in last["files"])


def test_plan_names_the_very_files_that_split_writes(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", weights="fp8")
    options = ("--pp-size", 3, "--engine", "vllm", "--json")
    planned = json.loads(cli("plan", source, *options).out)
    made = json.loads(cli("split", source, tmp_path / "out", *options).out)
    assert {key: made[key] for key in planned} == planned
    assert list(made)[len(planned) :] == [
        "present", "set_id", "changed",
        "written", "fetched", "linked", "reflinked", "copied", "reused", "launch",
    ]  # fmt: skip
    for stage in planned["stages"]:
        directory = tmp_path / "out" / f"stage-{stage['stage']:02d}-of-03"
        on_disk = {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}
        assert on_disk == {file["name"]: file["bytes"] for file in stage["files"]}


def test_nodes_share_the_stages(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", tied=True)
    document = json.loads(cli("plan", source, "--pp-size", 4, "--nodes", 2, "--json").out)
    assert [node["stages"] for node in document["nodes"]] == [[0, 1], [2, 3]]
    assert document["nodes"][0]["bytes"] == sum(s["bytes"] for s in document["stages"][:2])
    alone = json.loads(cli("plan", source, "--pp-size", 4, "--nodes", 1, "--json").out)
    assert alone["nodes"][0]["bytes"] == document["source"]["bytes"]  # the replica counts once
    assert cli("plan", source, "--pp-size", 4, "--nodes", 3).code == 2
    assert cli("split", source, tmp_path / "out", "--pp-size", 4, "--nodes", 3).code == 2
    assert not (tmp_path / "out").exists()


def test_table_of_the_plan(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    lines = cli("plan", source, "--pp-size", 2, "--exclude", "visual").out.splitlines()
    assert lines[0].startswith(f"plan of {source}: qwen3_5_moe, 227 tensors, 565 kB, 2 stages")
    assert lines[1].split() == [
        "stage", "layers", "bytes", "files", "tensors", "replicas", "by", "component",
    ]  # fmt: skip
    assert lines[2].split()[:3] == ["0", "0-3", "235"]
    assert lines[3].split()[:8] == [
        "1",
        "4-7",
        "312",
        "kB",
        "7",
        "113",
        "embed",
        lines[3].split()[-1],
    ]
    assert set(lines[3].split()[-1]) == set("░█▓▞")
    assert lines[4:] == [
        "░ embed: 1 tensor, 10.2 kB -> stages 0, 1",
        "█ layers: 138 tensors, 451 kB -> stages 0, 1",
        "▓ head: 2 tensors, 10.3 kB -> stage 1",
        "▞ mtp: 41 tensors, 66.0 kB -> stage 1",
        "excluded: visual, 45 tensors, 27.9 kB",
    ]


def test_split_ends_with_the_launch_lines(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "my model")
    out = tmp_path / "out"
    lines = cli("split", source, out, "--pp-size", 2, "--nodes", 2).out.splitlines()
    launch = (
        "SGLANG_PP_LAYER_PARTITION=4,4 python -m sglang.launch_server "
        "--model-path /models/my_model --pp-size 2 --nnodes 2 --node-rank {} "
        "--dist-init-addr HEAD:20000"
    )
    assert lines[-4:] == [
        f"  node 0: reshard pull {out} /models/my_model --stage 0",
        "          " + launch.format(0),
        f"  node 1: reshard pull {out} /models/my_model --stage 1",
        "          " + launch.format(1),
    ]
    other = tmp_path / "other"
    options = ("--pp-size", 4, "--nodes", 2, "--engine", "vllm", "--json")
    nodes = json.loads(cli("split", source, other, *options).out)["launch"]
    assert [node["stages"] for node in nodes] == [[0, 1], [2, 3]]
    assert nodes[1]["pull"].endswith("--stage 2-3")
    assert nodes[1]["launch"] == (
        "VLLM_PP_LAYER_PARTITION=2,2,2,2 vllm serve /models/my_model --pipeline-parallel-size 4 "
        "--nnodes 2 --node-rank 1 --master-addr HEAD --headless"
    )
    part = tmp_path / "part"
    nodes = json.loads(cli("split", source, part, *options, "--stage", "2-3").out)["launch"]
    assert [node["node"] for node in nodes] == [1]


def test_large_layer_files_get_fewer_loader_threads(tmp_path: Path) -> None:
    from reshard import build_plan, open_checkpoint
    from reshard.launch import node_commands
    from reshard.split import plan_manifest
    from tests.checkpoints import write_sparse

    for model, wanted in (("Qwen3.5-397B-A17B", True), ("Qwen3.5-35B-A3B", False)):
        source = write_sparse(tmp_path / model, model, 20)
        manifest = plan_manifest(build_plan(open_checkpoint(source), 4))
        (first, *_) = node_commands(manifest, "out")
        assert ('"num_threads": 2' in first.launch) == wanted


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0),
        (["--help"], 0),
        (["plan", "--help"], 0),
        (["--version"], 0),
        (["nonsense"], 2),
        (["plan", "SOURCE"], 2),
        (["plan", "SOURCE", "--pp-size", "0"], 2),
        (["plan", "SOURCE", "--pp-size", "9"], 2),
        (["plan", "SOURCE", "--pp-size", "two"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--engine", "tgi"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--layers", "4,4", "--balance"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--layers", "4"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--layers", "9,-1"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--exclude", "embed"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--replicate", "mtp"], 2),
        (["plan", "SOURCE", "--pp-size", "2", "--include-file", "none.safetensors"], 2),
        (["plan", "", "--pp-size", "2"], 2),
        (["plan", "nowhere", "--pp-size", "2"], 1),
        (["plan", "Qwen/Qwen3.5-35B-A3B", "--pp-size", "2"], 1),
        (["verify", "nowhere"], 1),
        (["verify", "SOURCE"], 1),
        (["plan", "SOURCE", "--pp-size", "2"], 0),
        (["plan", "SOURCE", "--pp-size", "2", "--engine", "SGLang"], 0),
        (["plan", "SOURCE", "--pp-size", "2", "--exclude", "mtp,visual"], 0),
        (["-h"], 0),
        (["plan", "SOURCE", "--pp-size", "2", "--balance"], 0),
    ],
)
def test_exit_codes(tmp_path: Path, cli: Cli, arguments: list[str], code: int) -> None:
    source = build(tmp_path / "source")
    result = cli(*[str(source) if a == "SOURCE" else a for a in arguments])
    if arguments:  # without any, help is shown, whose code typer decides
        assert result.code == code
    assert "Traceback" not in result.err
    if code == 1:
        assert "error: " in result.err
        assert "\nhint: " in result.err
        assert result.out == ""


def test_debug_shows_where_an_error_came_from(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.errors import CheckpointError

    monkeypatch.setenv("RESHARD_DEBUG", "1")
    with pytest.raises(CheckpointError):
        cli("plan", tmp_path / "nowhere", "--pp-size", 2)


def test_streams(tmp_path: Path, cli: Cli) -> None:
    """Without a terminal there is no bar: a line for each file on stderr, results on stdout."""
    source = build(tmp_path / "source")
    loud = cli("split", source, tmp_path / "loud", "--pp-size", 2)
    lines = loud.err.splitlines()
    assert len(lines) == 13
    assert sum(line.startswith("written stage-0") for line in lines) == 12
    assert "\r" not in loud.err
    quiet = cli("split", source, tmp_path / "quiet", "--pp-size", 2, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    document = cli("split", source, tmp_path / "json", "--pp-size", 2, "--json", "--quiet")
    assert (json.loads(document.out)["written"], document.err) == (12, "")
    failing = cli("split", source, tmp_path / "quiet", "--pp-size", 3, "--quiet")
    assert (failing.code, failing.out) == (1, "")
    assert failing.err.startswith("error: ")


def read_terminal(main: int) -> bytes:
    """Everything that is shown until the last process has closed the terminal."""
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(main, 4096):
            shown += piece
    os.close(main)
    return shown


def test_terminal_gets_a_bar_with_rate_and_time_left(tmp_path: Path) -> None:
    source = build(tmp_path / "source")
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, REPOSITORY / "cli.py", "split", source, tmp_path / "out"]
    process = subprocess.Popen(
        [*command, "--pp-size", "2"], stdout=subprocess.DEVNULL, stderr=terminal
    )
    os.close(terminal)
    shown = read_terminal(main)
    assert process.wait() == 0
    assert b"split:" in shown
    assert b"100%" in shown
    assert b"B/s" in shown
    assert b"written stage" not in shown


@pytest.mark.parametrize("columns", [40, 60, 75, 80, 200])
def test_narrow_terminal_cuts_nothing_but_the_bar(tmp_path: Path, columns: int) -> None:
    source = build(tmp_path / "source")
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, REPOSITORY / "cli.py", "plan", source, "--pp-size", "2"]
    replicate = ["--replicate", "visual", "--replicate", "head"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*command, *replicate], stdout=terminal, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(terminal)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", read_terminal(main).decode())
    lines = [line.rstrip() for line in shown.splitlines()]
    assert process.wait() == 0
    assert lines[1].split()[:6] == ["stage", "layers", "bytes", "files", "tensors", "replicas"]
    assert lines[2].split()[:6] == ["0", "0-3", "274", "kB", "7", "117"]
    assert lines[3].split()[6:8] == ["visual,", "embed"]
    assert ("█" in lines[2]) == (columns >= 75)
    assert not any("…" in line for line in lines)
    assert all(len(line) <= columns for line in lines[1:4]) or columns < 60


def test_terminal_without_unicode_gets_letters(tmp_path: Path) -> None:
    source = build(tmp_path / "source")
    shown = subprocess.run(
        [sys.executable, REPOSITORY / "cli.py", "plan", source, "--pp-size", "2"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    ).stdout.decode("ascii")
    assert "\nm mtp: 41 tensors, 66.0 kB -> stage 1\n" in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "SOURCE", "--pp-size", "2"]])
def test_output_that_cannot_be_written(tmp_path: Path, arguments: list[str]) -> None:
    source = build(tmp_path / "source")
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, REPOSITORY / "cli.py"]
            + [str(source) if a == "SOURCE" else a for a in arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr == "error: standard output: No space left on device\n"


def test_stray_file_with_a_hostile_name(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    (tmp_path / "out" / "\x1b[31mx.safetensors").write_bytes(b"")
    result = cli("verify", tmp_path / "out")
    assert result.code == 1
    assert "\\x1b[31mx.safetensors: is not part of the set" in result.out
    assert "\x1b" not in result.out + result.err


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, cli: Cli) -> None:
    from tests.checkpoints import write_tensors

    source = build(tmp_path / "source", shards=1, index=False)
    tensors = read_dir(source)
    for number in range(30):
        tensors[f"\x1b[31mred{number}\n\x07[bold]" + "x" * 1000] = ("U8", (1,), b"1")
    write_tensors(source / "model.safetensors", tensors)
    result = cli("plan", source, "--pp-size", 2)
    assert result.code == 1
    assert "\x1b" not in result.err
    assert "\x07" not in result.err
    assert "30 tensors belong to no part of qwen3_5_moe" in result.err
    assert result.err.count("\\x1b[31mred") == 10
    assert "... and 20 more" in result.err
    assert max(map(len, result.err.splitlines())) < 250


def test_absurd_inputs_are_refused_in_a_line(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "sparse").mkdir()
    for path in source.iterdir():
        (tmp_path / "sparse" / path.name).write_bytes(path.read_bytes())
    os.truncate(tmp_path / "sparse" / "config.json", 20_000_000_000)
    deep = build(tmp_path / "deep")
    (deep / "config.json").write_text('{"model_type":' + "[" * 100_000)
    for arguments in (
        ["plan", source, "--pp-size", "99999999999999999999"],
        ["plan", source, "--pp-size", "1000000000"],
        ["plan", tmp_path / "loop", "--pp-size", "2"],
        ["split", source, tmp_path / "loop", "--pp-size", "2"],
        ["split", source, "", "--pp-size", "2"],
        ["plan", tmp_path / ("x" * 5000), "--pp-size", "2"],
        ["plan", tmp_path / "sparse", "--pp-size", "2"],
        ["plan", deep, "--pp-size", "2"],
        ["plan", source, "--pp-size", "2", "--engine", "\x1b[31m"],
    ):
        result = cli(*arguments)
        assert result.code in (1, 2), arguments
        assert result.err.count("\n") <= 2
        assert "\x1b" not in result.err
        assert "standard output" not in result.err


def test_model_without_any_bytes(tmp_path: Path, cli: Cli) -> None:
    from tests.checkpoints import write_tensors

    source = build(tmp_path / "source", shards=1, index=False)
    empty = {name: (dtype, (0, 4), b"") for name, (dtype, _, _) in read_dir(source).items()}
    write_tensors(source / "model.safetensors", empty)
    assert cli("split", source, tmp_path / "out", "--pp-size", 2).code == 0
    assert cli("verify", tmp_path / "out", "--source", source).code == 0


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    source = build(tmp_path / "source")
    redirections = " ".join(f"{number}>&-" for number in closed.split())
    command = (
        f'"{sys.executable}" "{REPOSITORY}/cli.py" split source out --pp-size 2 {redirections}'
    )
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    assert (tmp_path / "out" / "reshard.json").exists()
    assert source.exists()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict", "latin-1"])
def test_names_that_the_terminal_cannot_show(tmp_path: Path, encoding: str) -> None:
    build(tmp_path / "modèle")
    name = b"o\xff".decode("utf-8", "surrogateescape")
    done = subprocess.run(
        [sys.executable, REPOSITORY / "cli.py", "split", "modèle", name, "--pp-size", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_nohup_is_respected(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    source = build(tmp_path / "source")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("split", source, tmp_path / "out", "--pp-size", 2)
    finally:
        signal.signal(signal.SIGHUP, before)
    while process.poll() is None:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    assert process.returncode == 0
