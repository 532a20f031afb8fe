"""The output directory: what is refused, what a failure leaves, and that the source stays as it is."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reshard import open_checkpoint, verify
from tests.checkpoints import build
from tests.conftest import Cli, tree

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize("where", ["same", "inside", "around", "link", "link inside", "dots"])
def test_output_and_source_must_be_apart(tmp_path: Path, cli: Cli, where: str) -> None:
    source = build(tmp_path / "a" / "source")
    (tmp_path / "link").symlink_to(source)
    out = {
        "same": source,
        "inside": source / "out",
        "around": tmp_path / "a",
        "link": tmp_path / "link",
        "link inside": tmp_path / "link" / "deep" / "out",
        "dots": source / "x" / "..",
    }[where]
    before = tree(tmp_path)
    result = cli("split", source, out, "--pp-size", 2)
    assert result.code == 1
    assert "nothing was written" in result.err
    assert tree(tmp_path) == before


def test_pull_and_merge_must_be_apart_from_their_set(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    before = tree(tmp_path)
    for dest in (out, out / "dest", out / "stage-00-of-02"):
        assert cli("pull", out, dest, "--stage", 0).code == 1
        assert cli("merge", out, dest).code == 1
        assert cli("split", out, dest, "--pp-size", 1).code == 1
    assert tree(tmp_path) == before


def test_output_that_is_not_ours_is_a_usage_error(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    (tmp_path / "file").write_text("something")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    for name, message in (
        ("file", "is a file, not a directory"),
        ("full", "is not empty, and not an output of reshard"),
        ("broken", "is a broken link"),
    ):
        result = cli("split", source, tmp_path / name, "--pp-size", 2)
        assert (result.code, message in result.err) == (2, True)
    shards = sorted(source.glob("*.safetensors"))
    assert cli("split", *shards, tmp_path / "out", "--pp-size", 2).code == 2
    assert cli("split", shards[0], tmp_path / "out", "--pp-size", 2).code == 1
    assert tree(tmp_path) == before


def test_empty_and_new_directories_are_fine(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    for out in ("empty", "disk", "new/and/deep"):
        assert cli("split", source, tmp_path / out, "--pp-size", 2).code == 0
        assert verify(tmp_path / out).ok


def test_source_is_never_written_to(tmp_path: Path, cli: Cli) -> None:
    """Not even its times change: it may lie on a read-only file system."""
    source = build(tmp_path / "source")
    out = tmp_path / "out"

    def state() -> dict[Path, tuple[int, ...]]:
        paths = (source, *source.rglob("*"))
        return {p: (p.stat().st_mtime_ns, p.stat().st_ctime_ns, p.stat().st_ino) for p in paths}

    before, content = state(), tree(source)
    cli("plan", source, "--pp-size", 2)
    cli("inspect", source)
    cli("split", source, out, "--pp-size", 2)
    cli("verify", out, "--source", source)
    cli("merge", out, tmp_path / "merged")
    assert (state(), tree(source)) == (before, content)


@pytest.mark.parametrize("place", [".reshard-partial", "stage-00-of-02"])
def test_links_planted_in_the_output_lead_nowhere(tmp_path: Path, cli: Cli, place: str) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    (tmp_path / "elsewhere").mkdir()
    if place != ".reshard-partial":
        shutil.rmtree(out / place)
    (out / place).symlink_to(tmp_path / "elsewhere")
    result = cli("split", source, out, "--pp-size", 2)
    assert result.code == 1
    assert "is a link; reshard writes inside its output only" in result.err
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["journal", "lock"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "directory", "device"])
def test_what_is_planted_as_journal_or_lock_is_left_alone(
    tmp_path: Path, cli: Cli, name: str, kind: str
) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    (out / ".reshard-partial").mkdir(parents=True)
    victim = min(source.glob("*.safetensors"))
    before = victim.read_bytes()
    place = out / ".reshard-partial" / name
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "hard link":
        place.hardlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")
    result = cli("split", source, out, "--pp-size", 2)
    assert result.code == 1
    assert f"{name} is not a plain file of its own" in result.err
    assert victim.read_bytes() == before


def test_link_under_a_final_name_is_replaced_not_followed(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for name in ("config.json", "stage-00-of-02/model-embed.safetensors"):
        (out / name).unlink()
        (out / name).symlink_to(victim)
    assert cli("split", source, out, "--pp-size", 2).code == 0
    assert victim.read_text() == "untouched"
    assert not (out / "config.json").is_symlink()
    assert not (out / "stage-00-of-02/model-embed.safetensors").is_symlink()


def test_checksums_are_not_written_through_a_linked_stage(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2, "--no-checksum")
    (out / "stage-00-of-02").rename(tmp_path / "elsewhere")
    (out / "stage-00-of-02").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    result = cli("verify", out, "--write-checksums")
    assert (result.code, "stage-00-of-02: is a link" in result.out) == (1, True)
    assert tree(tmp_path / "elsewhere") == before


def test_killed_writing_of_checksums_is_continued(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2, "--no-checksum")
    (out / "stage-00-of-02" / ".reshard-tmp-1-1").write_bytes(b"half")
    assert cli("verify", out).code == 1
    assert cli("verify", out, "--write-checksums").code == 0


@pytest.mark.parametrize("change", ["replace", "truncate", "fifo"])
def test_set_that_changes_while_it_is_linked(tmp_path: Path, change: str) -> None:
    from reshard import build_plan, split
    from reshard.errors import ReshardError

    source = build(tmp_path / "source")
    split(build_plan(open_checkpoint(source), 2), tmp_path / "set")
    plan = build_plan(open_checkpoint(tmp_path / "set"), 4)
    file = tmp_path / "set/stage-00-of-02/model-visual.safetensors"
    content = file.read_bytes()
    file.unlink()
    if change == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes(content if change == "replace" else content[:-1])
    with pytest.raises(ReshardError, match="changed|regular file|bytes, the manifest"):
        split(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_another_run_did_meanwhile_is_seen(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at an output and its lock, another run may finish there."""
    from reshard.output import OutputDirectory

    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "set", "--pp-size", 2)
    hold = OutputDirectory.hold

    def run(first: list[object], meanwhile: list[object]) -> int:
        def other_first(*arguments: object, **named: object) -> object:
            monkeypatch.setattr(OutputDirectory, "hold", hold)
            assert cli(*meanwhile).code == 0
            return hold(*arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(OutputDirectory, "hold", other_first)
        return cli(*first).code

    def split(out: str, pp_size: int, *options: object) -> list[object]:
        return ["split", source, tmp_path / out, "--pp-size", pp_size, *options]

    def pull(dest: str, stage: int) -> list[object]:
        return ["pull", tmp_path / "set", tmp_path / dest, "--stage", stage]

    merge: list[object] = ["merge", tmp_path / "set", tmp_path / "c"]
    assert run(split("a", 2, "--stage", 0), split("a", 2, "--stage", 1)) == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "set")
    assert run(pull("b", 0), pull("b", 1)) == 0
    assert json.loads((tmp_path / "b/reshard.json").read_bytes())["present"] == [0, 1]
    assert run(merge, pull("c", 0)) == 1
    assert run(pull("d", 0), ["merge", tmp_path / "set", tmp_path / "d"]) == 2
    assert run(split("e", 4), split("e", 2)) == 1
    for out in ("a", "b", "c", "e"):
        assert verify(tmp_path / out, source=source).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts file systems of so many kB; needs the right to mount."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        place = tmp_path / f"disk-{kilobytes}"
        place.mkdir()
        options = ["-o", f"size={kilobytes}k"]
        command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(place)]
        made = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False)
        if not made or made.returncode:
            pytest.skip("mounting a small file system is not permitted here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_free_space_is_checked_before_anything_is_written(
    tmp_path: Path, cli: Cli, small_disk: Callable[[int], Path]
) -> None:
    source = build(tmp_path / "source")
    (source / "big-vocabulary.txt").write_bytes(b"x" * 300_000)  # counts three times
    disk = small_disk(1200)
    result = cli("split", source, disk / "out", "--pp-size", 2)
    assert result.code == 1
    assert "bytes are needed" in result.err
    assert "are free" in result.err
    assert list(disk.iterdir()) == []


def test_disk_that_fills_up_on_the_way(
    tmp_path: Path, cli: Cli, start: Start, small_disk: Callable[[int], Path]
) -> None:
    source = build(
        tmp_path / "source", hidden_size=256, moe_intermediate_size=320, experts=16, mtp=None
    )
    disk = small_disk(120_000)
    out = disk / "out"
    process = start("split", source, out, "--pp-size", 2, "--jobs", 1)
    while not list(out.rglob("model-*")) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "something-else").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 8_000_000)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "No space left on device" in err
    assert "hint: free some space or choose another disk, then run the same command" in err
    assert not (out / "reshard.json").exists()
    assert not list(out.rglob(".reshard-tmp-*"))
    (disk / "something-else").unlink()
    document = json.loads(cli("split", source, out, "--pp-size", 2, "--json").out)
    assert document["reused"] >= 1
    assert verify(out, source=open_checkpoint(source)).ok


def test_write_error_in_the_middle_of_a_file(tmp_path: Path, cli: Cli) -> None:
    """A limit on file sizes stands for any error of the operating system."""
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        result = cli("split", source, out, "--pp-size", 2, "--jobs", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.code == 1
    assert "File too large" in result.err
    assert "Traceback" not in result.err
    assert not list(tmp_path.rglob("reshard.json"))
    assert not list(tmp_path.rglob(".reshard-tmp-*"))
    assert cli("split", source, out, "--pp-size", 2).code == 0
    assert verify(out, source=open_checkpoint(source)).ok


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A directory that everybody may read, and this process without the rights of root."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    user = os.geteuid()
    try:
        yield directory
    finally:
        os.seteuid(user)
        shutil.rmtree(directory)


def test_unreadable_shard_and_unwritable_output(nobody: Path, cli: Cli) -> None:
    source = build(nobody / "source")
    (nobody / "closed").mkdir(mode=0o555)
    for path in source.iterdir():
        path.chmod(0o444)
    if os.geteuid() == 0:
        os.seteuid(65534)
    result = cli("split", source, nobody / "closed" / "out", "--pp-size", 2)
    assert result.code == 1
    assert "closed/out: Permission denied" in result.err
    assert "hint: check the permissions" in result.err
    if os.getuid() == 0:
        os.seteuid(0)
    shard = next(source.glob("*.safetensors"))
    shard.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    result = cli("split", source, nobody / "out", "--pp-size", 2)
    assert result.code == 1
    assert f"{shard}: Permission denied" in result.err
    assert not (nobody / "out").exists()


def test_source_that_changes_while_it_is_copied(tmp_path: Path) -> None:
    from reshard import build_plan, split
    from reshard.errors import SourceChangedError

    source = build(tmp_path / "source")
    plan = build_plan(open_checkpoint(source), 2)
    shard = max(source.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SourceChangedError, match="changed while it was being read"):
        split(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
