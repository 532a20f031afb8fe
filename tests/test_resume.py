"""Killed runs continue, finished sets stay as they are, and nothing different is mixed in."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard import open_checkpoint, verify
from tests.checkpoints import build
from tests.conftest import Cli, tree

Start = Callable[..., "subprocess.Popen[str]"]


def big(path: Path) -> Path:
    """Some 60 MB, so that a run takes long enough to be killed in the middle."""
    return build(path, hidden_size=256, moe_intermediate_size=320, experts=16)


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def finished_files(out: Path) -> int:
    try:
        return (out / ".reshard-partial" / "journal").read_bytes().count(b"\n") - 1
    except FileNotFoundError:  # not yet, or not any more
        return 0


def journal_lines(out: Path) -> list[bytes]:
    return (out / ".reshard-partial" / "journal").read_bytes().splitlines()


@pytest.mark.parametrize("torn", [b'{"file": "stage-00', b"\0\0\0\n", b"[]\n", b'{"file": 3}\n'])
def test_torn_journal_is_continued_more_than_once(
    tmp_path: Path, cli: Cli, start: Start, torn: bytes
) -> None:
    source = big(tmp_path / "source")
    out = tmp_path / "out"
    for enough in (1, 3):
        process = start("split", source, out, "--pp-size", 2, "--jobs", 1)
        kill_when(process, lambda: finished_files(out) >= enough)  # noqa: B023
        with (out / ".reshard-partial" / "journal").open("ab") as journal:
            journal.write(torn)
    document = json.loads(cli("split", source, out, "--pp-size", 2, "--json").out)
    assert document["reused"] >= 3
    assert verify(out, source=open_checkpoint(source)).ok


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b"nonsense"])
def test_journal_without_a_head_is_begun_anew(tmp_path: Path, cli: Cli, content: bytes) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    (out / ".reshard-partial").mkdir(parents=True)
    (out / ".reshard-partial" / "journal").write_bytes(content)
    assert cli("split", source, out, "--pp-size", 2).code == 0
    assert verify(out, source=open_checkpoint(source)).ok


def test_killed_split_continues_and_ends_in_the_same_bytes(
    tmp_path: Path, cli: Cli, start: Start
) -> None:
    source = big(tmp_path / "source")
    before = tree(source)
    cli("split", source, tmp_path / "whole", "--pp-size", 4)
    out = tmp_path / "out"
    process = start("split", source, out, "--pp-size", 4, "--jobs", 1)
    kill_when(process, lambda: finished_files(out) >= 3)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "reshard.json").exists()
    # Half a line at the end of the journal, and a half-written file: what a kill may leave.
    with (out / ".reshard-partial" / "journal").open("ab") as journal:
        journal.write(b'{"file": "stage-00-of-')
    (out / "stage-01-of-04" / ".reshard-tmp-1-1").write_bytes(b"half")
    # A file that nobody finished, under a final name.
    (out / "stage-03-of-04" / "model-head.safetensors").write_bytes(b"")
    (out / json.loads(journal_lines(out)[2])["file"]).unlink()  # and one that somebody removed
    unfinished = cli("verify", out)
    assert (unfinished.code, "is an unfinished output" in unfinished.err) == (1, True)
    result = cli("split", source, out, "--pp-size", 4, "--json")
    document = json.loads(result.out)
    assert document["reused"] >= 2
    assert document["reused"] + document["written"] == 12
    assert tree(out) == tree(tmp_path / "whole")
    assert tree(source) == before


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_again_and_again(
    tmp_path: Path, cli: Cli, start: Start, seed: int
) -> None:
    source = build(tmp_path / "source", tied=True)
    cli("split", source, tmp_path / "whole", "--pp-size", 3)
    out = tmp_path / "out"
    moments = random.Random(seed)
    for _ in range(4):
        process = start("split", source, out, "--pp-size", 3)
        moment = time.monotonic() + 0.15 + moments.random() * 0.35
        kill_when(process, lambda: time.monotonic() > moment)  # noqa: B023
    assert cli("split", source, out, "--pp-size", 3).code == 0
    assert tree(out) == tree(tmp_path / "whole")
    assert verify(out, source=open_checkpoint(source)).ok


@pytest.mark.parametrize("command", ["pull", "merge", "split"])
def test_killed_copies_of_a_set_continue(
    tmp_path: Path, cli: Cli, start: Start, command: str
) -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no second file system, so everything is linked at once")
    source = big(tmp_path / "source")
    cli("split", source, tmp_path / "set", "--pp-size", 2)
    dest = Path("/dev/shm") / f"reshard-test-{os.getpid()}-{command}"
    options = {"pull": ["--stage", "all"], "merge": [], "split": ["--pp-size", 3]}[command]
    try:
        process = start(command, tmp_path / "set", dest, *options)
        kill_when(process, lambda: finished_files(dest) >= 2)
        assert cli(command, tmp_path / "set", dest, *options).code == 0
        cli(command, tmp_path / "set", tmp_path / "whole", *options)
        assert tree(dest) == tree(tmp_path / "whole")
    finally:
        shutil.rmtree(dest, ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_leaves_a_resumable_output(
    tmp_path: Path, cli: Cli, start: Start, number: int
) -> None:
    source = big(tmp_path / "source")
    out = tmp_path / "out"
    process = start("split", source, out, "--pp-size", 2, "--jobs", 1)
    while finished_files(out) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "error: interrupted" in err
    assert "hint: run the same command again; it continues where it stopped" in err
    assert not (out / "reshard.json").exists()
    assert not list(out.rglob(".reshard-tmp-*"))
    assert cli("split", source, out, "--pp-size", 2).code == 0
    assert verify(out, source=open_checkpoint(source)).ok


def test_finished_set_is_left_as_it_is(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2, "--no-checksum")

    def state() -> dict[Path, int]:
        return {path: path.lstat().st_ctime_ns for path in (out, *out.rglob("*"))}

    before = state()
    again = cli("split", source, out, "--pp-size", 2)
    assert again.code == 0
    assert "complete already; reshard verify reads the contents" in again.out
    assert f"reshard verify {out} --write-checksums" in again.err
    assert state() == before


def test_leftover_of_a_run_killed_at_the_very_end_is_removed(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    before = tree(out)
    (out / ".reshard-partial").mkdir()
    assert cli("split", source, out, "--pp-size", 2).code == 0
    assert tree(out) == before
    assert not (out / ".reshard-partial").exists()


def test_lost_files_of_a_finished_set_are_made_again(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    before = tree(out)
    (out / "stage-01-of-02" / "model-layer-00006.safetensors").unlink()
    (out / "stage-00-of-02" / "model-visual.safetensors").write_bytes(b"short")
    document = json.loads(cli("split", source, out, "--pp-size", 2, "--json").out)
    assert (document["written"], document["linked"]) == (2, 0)
    assert tree(out) == before
    for name in (
        "config.json",
        "model.safetensors.index.json",
        "stage-00-of-02/tokenizer.json",
        "stage-01-of-02/model.safetensors.index.json",
        "stage-01-of-02/reshard.json",
    ):
        (out / name).unlink()
    document = json.loads(cli("split", source, out, "--pp-size", 2, "--json").out)
    assert (document["written"], document["linked"], document["changed"]) == (0, 0, True)
    assert tree(out) == before
    shutil.rmtree(out / "stage-01-of-02")
    document = json.loads(cli("split", source, out, "--pp-size", 2, "--json").out)
    assert (document["written"], document["linked"]) == (6, 1)
    assert tree(out) == before


def test_adding_a_stage_repairs_the_others(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2, "--stage", 0)
    (out / "stage-00-of-02" / "vocab.json").unlink()
    (out / "stage-00-of-02" / "model-embed.safetensors").unlink()
    assert cli("split", source, out, "--pp-size", 2, "--stage", 1).code == 0
    cli("split", source, tmp_path / "whole", "--pp-size", 2)
    assert tree(out) == tree(tmp_path / "whole")


def test_equal_counts_are_one_set_however_they_were_asked_for(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 3)
    again = cli("split", source, tmp_path / "out", "--pp-size", 3, "--layers", "2,3,3")
    assert again.code == 0


def test_lost_manifest_of_the_root(tmp_path: Path, cli: Cli) -> None:
    """The stages can still be collected, and that without copying."""
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    (out / "reshard.json").unlink()
    refused = cli("split", source, out, "--pp-size", 2)
    assert refused.code == 2
    assert f"reshard pull {out}/stage-00-of-02 NEW --stage 0" in refused.err
    for stage in (0, 1):
        directory = out / f"stage-0{stage}-of-02"
        assert cli("pull", directory, tmp_path / "new", "--stage", stage).code == 0
    assert verify(tmp_path / "new", source=open_checkpoint(source)).ok


def test_source_that_is_older_than_1970(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    for path in source.iterdir():
        os.utime(path, (-1_000_000, -1_000_000))
    assert cli("split", source, tmp_path / "out", "--pp-size", 2).code == 0
    assert cli("split", source, tmp_path / "out", "--pp-size", 2).code == 0
    assert verify(tmp_path / "out", source=source).ok


def test_other_plan_is_refused(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    before = tree(out)
    for options, difference in (
        (["--pp-size", 3], "partition"),
        (["--pp-size", 2, "--engine", "vllm"], "engine"),
        (["--pp-size", 2, "--layers", "3,5"], "partition"),
        (["--pp-size", 2, "--exclude", "mtp"], "excluded"),
        (["--pp-size", 2, "--replicate", "head"], "stages"),
    ):
        refused = cli("split", source, out, *options)
        assert refused.code == 1, options
        assert "holds another set; it differs in" in refused.err
        assert difference in refused.err
    assert tree(out) == before


def test_unfinished_output_of_another_plan_or_source_is_refused(
    tmp_path: Path, cli: Cli, start: Start
) -> None:
    source = big(tmp_path / "source")
    out = tmp_path / "out"
    process = start("split", source, out, "--pp-size", 2, "--jobs", 1)
    kill_when(process, lambda: finished_files(out) >= 1)
    before = tree(out)
    del before[".reshard-partial/lock"]  # of the killed run; the next one takes it and leaves
    other = cli("split", source, out, "--pp-size", 4)
    assert other.code == 1
    assert "was begun with another partition: [4, 4], now [2, 2, 2, 2]" in other.err
    shard = max(source.glob("*.safetensors"))
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = cli("split", source, out, "--pp-size", 2)
    assert touched.code == 1
    assert f"was begun with another state of {shard.name}" in touched.err
    assert tree(out) == before


def test_same_names_sizes_and_headers_with_other_bytes_are_another_source(
    tmp_path: Path, cli: Cli
) -> None:
    """Two training steps of one model differ in nothing else."""
    for seed in (0, 1):
        build(tmp_path / str(seed) / "source", seed=seed)
    ids = []
    for seed in (0, 1):
        source, out = tmp_path / str(seed) / "source", tmp_path / str(seed) / "out"
        ids.append(json.loads(cli("split", source, out, "--pp-size", 2, "--json").out)["set_id"])
    assert ids[0] != ids[1]
    refused = cli("split", tmp_path / "1/source", tmp_path / "0/out", "--pp-size", 2)
    assert refused.code == 1
    assert "it differs in source" in refused.err


def test_changed_source_of_a_finished_set_is_refused(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2, "--stage", 0)
    os.utime(next(source.glob("*.safetensors")), ns=(1, 1))
    refused = cli("split", source, out, "--pp-size", 2, "--stage", 1)
    assert refused.code == 1
    assert "the files of the source are not those that" in refused.err


def test_second_process_on_one_output_is_refused(tmp_path: Path, cli: Cli, start: Start) -> None:
    source = big(tmp_path / "source")
    out = tmp_path / "out"
    process = start("split", source, out, "--pp-size", 2, "--jobs", 1)
    while not finished_files(out) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    refused = cli("split", source, out, "--pp-size", 2)
    assert refused.code == 1
    assert f"is being written by another run (process {process.pid} on " in refused.err
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0
    assert verify(out, source=open_checkpoint(source)).ok
