"""Splitting an earlier output again: files that stay identical are linked, nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from reshard import open_checkpoint, verify
from tests.checkpoints import build
from tests.conftest import Cli, tree


def test_new_partition_links_every_file(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 4)
    result = cli("split", tmp_path / "a", tmp_path / "b", "--pp-size", 3, "--json")
    document = json.loads(result.out)
    assert document["linked"] == 13
    assert [document[how] for how in ("written", "reflinked", "copied", "reused")] == [0, 0, 0, 0]
    inodes = {path.stat().st_ino for path in (tmp_path / "a").rglob("*.safetensors")}
    assert {path.stat().st_ino for path in (tmp_path / "b").rglob("*.safetensors")} == inodes
    assert verify(tmp_path / "b", source=open_checkpoint(source)).ok


@pytest.mark.parametrize("exclude", [[], ["--exclude", "mtp"], ["--exclude", "visual"]])
def test_new_partition_equals_a_split_of_the_original(
    tmp_path: Path, cli: Cli, exclude: list[str]
) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 4, *exclude)
    cli("split", tmp_path / "a", tmp_path / "b", "--pp-size", 3)
    cli("split", source, tmp_path / "c", "--pp-size", 3, *exclude)
    again, direct = tree(tmp_path / "b"), tree(tmp_path / "c")
    manifests = json.loads(again.pop("reshard.json")), json.loads(direct.pop("reshard.json"))
    assert again == direct
    for manifest in manifests:  # where the source lay is all that differs
        del manifest["local"]
    assert manifests[0] == manifests[1]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")
def test_other_file_system_gets_copies(tmp_path: Path, cli: Cli) -> None:
    import tempfile

    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 2)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            pytest.skip("no second file system")
        result = cli("split", tmp_path / "a", Path(other) / "b", "--pp-size", 3, "--json")
        document = json.loads(result.out)
        assert (document["copied"], document["linked"]) == (12, 1)
        assert verify(Path(other) / "b", source=open_checkpoint(source)).ok
        # A file that rotted since it was hashed is noticed as it is copied.
        damaged = tmp_path / "a/stage-00-of-02/model-layer-00001.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        refused = cli("split", tmp_path / "a", Path(other) / "c", "--pp-size", 3)
        assert refused.code == 1
        assert "model-layer-00001.safetensors: its sha256 is" in refused.err
        assert not (Path(other) / "c" / "reshard.json").exists()


def test_files_of_a_hub_cache_are_not_linked(tmp_path: Path, cli: Cli) -> None:
    """A set in a cache is links to blobs, which belong to the cache."""
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 2)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate((tmp_path / "a").rglob("*.safetensors")):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    inodes = {path.stat().st_ino for path in blobs.iterdir()}
    document = json.loads(
        cli("split", tmp_path / "a", tmp_path / "b", "--pp-size", 3, "--json").out
    )
    assert document["copied"] + document["reflinked"] == 12
    made = list((tmp_path / "b").rglob("*.safetensors"))
    assert not any(path.is_symlink() or path.stat().st_ino in inodes for path in made)


@pytest.mark.skipif(shutil.which("mkfs.btrfs") is None, reason="needs btrfs-progs")
def test_blocks_are_shared_where_a_file_cannot_be_linked(tmp_path: Path, cli: Cli) -> None:
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(200_000_000)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-o", "loop", image, disk], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        source = build(disk / "source")
        cli("split", source, disk / "a", "--pp-size", 2)
        blob = disk / "blob"
        file = disk / "a/stage-00-of-02/model-layer-00000.safetensors"
        file.rename(blob)
        file.symlink_to(blob)
        made = cli("split", disk / "a", disk / "b", "--pp-size", 3, "--json")
        document = json.loads(made.out)
        assert (document["reflinked"], document["linked"], document["copied"]) == (1, 12, 0)
        assert verify(disk / "b", source=open_checkpoint(source)).ok
    finally:
        subprocess.run(["umount", disk], check=True)


def test_linked_file_keeps_its_checksum_and_gets_a_missing_one(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "hashed", "--pp-size", 2)
    cli("split", source, tmp_path / "bare", "--pp-size", 2, "--no-checksum")
    cli("split", tmp_path / "hashed", tmp_path / "a", "--pp-size", 3, "--no-checksum")
    cli("split", tmp_path / "bare", tmp_path / "b", "--pp-size", 3)
    for out in ("a", "b"):
        stages = json.loads((tmp_path / out / "reshard.json").read_bytes())["stages"]
        assert all(file["sha256"] for stage in stages for file in stage["files"])


def test_engine_of_the_source_set_is_remembered(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 2, "--engine", "vllm")
    result = cli("plan", tmp_path / "a", "--pp-size", 4)
    assert "warning: the source was split for vllm, this plan is for sglang" in result.err
