"""Merging: a set becomes one ordinary checkpoint again, with nothing lost and nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import build, read_dir, read_file
from tests.conftest import Cli, tree


@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4", "autoround"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_merge_gives_the_tensors_back(tmp_path: Path, cli: Cli, weights: str, engine: str) -> None:
    source = build(tmp_path / "source", weights=weights)
    cli("split", source, tmp_path / "out", "--pp-size", 3, "--engine", engine)
    assert cli("merge", tmp_path / "out", tmp_path / "merged").code == 0
    assert read_dir(tmp_path / "merged") == read_dir(source)
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_bytes())
    for name, file in index["weight_map"].items():
        assert name in read_file(tmp_path / "merged" / file)
    sizes = sum(len(tensor[2]) for tensor in read_dir(source).values())
    assert index["metadata"] == {"total_size": sizes}
    assert not (tmp_path / "merged/reshard.json").exists()
    config = (source / "config.json").read_bytes()
    assert (tmp_path / "merged/config.json").read_bytes() == config


def test_merged_checkpoint_is_linked_flat_and_splits_alike(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 3)
    result = cli("merge", tmp_path / "out", tmp_path / "merged", "--json")
    document = json.loads(result.out)
    assert (document["linked"], document["written"]) == (12, 0)
    assert all(path.is_file() for path in (tmp_path / "merged").iterdir())
    cli("split", tmp_path / "merged", tmp_path / "again", "--pp-size", 3)
    ours = {k: v for k, v in tree(tmp_path / "again").items() if k.endswith(".safetensors")}
    assert ours == {k: v for k, v in tree(tmp_path / "out").items() if k.endswith(".safetensors")}


def test_merge_again_does_nothing(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    cli("merge", tmp_path / "out", tmp_path / "merged")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "merged").iterdir()}
    again = cli("merge", tmp_path / "out", tmp_path / "merged")
    assert again.code == 0
    assert "complete already" in again.out
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "merged").iterdir()}
    for name in ("vocab.json", "model-head.safetensors"):
        (tmp_path / "merged" / name).unlink()
        assert cli("merge", tmp_path / "out", tmp_path / "merged").code == 2


def test_merge_killed_at_the_very_end_is_cleaned_up(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    cli("merge", tmp_path / "out", tmp_path / "merged")
    (tmp_path / "merged/.reshard-partial").mkdir()
    assert cli("plan", tmp_path / "merged", "--pp-size", 2).code == 1
    assert cli("merge", tmp_path / "out", tmp_path / "merged").code == 0
    assert not (tmp_path / "merged/.reshard-partial").exists()
    assert cli("plan", tmp_path / "merged", "--pp-size", 2).code == 0


def test_merge_needs_every_stage_and_every_file(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "some", "--pp-size", 3, "--stage", "0-1")
    refused = cli("merge", tmp_path / "some", tmp_path / "merged")
    assert (refused.code, "stages 2 are not here" in refused.err) == (1, True)
    cli("split", source, tmp_path / "out", "--pp-size", 3)
    (tmp_path / "out/stage-01-of-03/model-layer-00003.safetensors").unlink()
    refused = cli("merge", tmp_path / "out", tmp_path / "merged")
    assert refused.code == 1
    assert "stage-01-of-03/model-layer-00003.safetensors: no such file" in refused.err
    assert not (tmp_path / "merged").exists()
