"""Pulling stages out of a local set into an ordinary model directory."""

from __future__ import annotations

import json
from pathlib import Path

from reshard import open_checkpoint, verify
from tests.checkpoints import build, read_dir
from tests.conftest import Cli, tree


def test_one_stage_becomes_a_model_directory(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 4)
    result = cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", 2, "--json")
    assert json.loads(result.out)["linked"] == 2
    assert tree(tmp_path / "dest") == tree(tmp_path / "out/stage-02-of-04")
    assert verify(tmp_path / "dest", source=open_checkpoint(source)).ok


def test_stages_of_one_node_share_a_directory(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", tied=True)
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 4)
    cli("pull", out, tmp_path / "both", "--stage", "0,3")
    cli("pull", out, tmp_path / "one-by-one", "--stage", 3)
    cli("pull", out, tmp_path / "one-by-one", "--stage", 0)
    assert tree(tmp_path / "both") == tree(tmp_path / "one-by-one")
    expected = read_dir(out / "stage-00-of-04") | read_dir(out / "stage-03-of-04")
    assert read_dir(tmp_path / "both") == expected
    assert verify(tmp_path / "both").ok
    again = cli("pull", out, tmp_path / "both", "--stage", 3)
    assert (again.code, "complete already" in again.out) == (0, True)


def test_all_stages_are_the_whole_model_and_can_be_split_again(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", "qwen3_vl_moe", weights="fp8")
    cli("split", source, tmp_path / "out", "--pp-size", 2, "--engine", "vllm")
    cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", "all")
    assert read_dir(tmp_path / "dest") == read_dir(source)
    assert verify(tmp_path / "dest", source=open_checkpoint(source)).ok
    result = cli("split", tmp_path / "dest", tmp_path / "again", "--pp-size", 1, "--json")
    assert json.loads(result.out)["linked"] == 11


def test_pull_from_a_stage_directory_and_from_a_pulled_one(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    assert cli("pull", tmp_path / "out/stage-01-of-02", tmp_path / "a", "--stage", 1).code == 0
    assert cli("pull", tmp_path / "a", tmp_path / "b", "--stage", 1).code == 0
    assert tree(tmp_path / "b") == tree(tmp_path / "out/stage-01-of-02")
    refused = cli("pull", tmp_path / "a", tmp_path / "c", "--stage", 0)
    assert refused.code == 1
    assert "stages 0 are not in" in refused.err


def test_stages_of_different_sets_do_not_mix(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 2)
    cli("split", source, tmp_path / "b", "--pp-size", 4)
    cli("pull", tmp_path / "a", tmp_path / "dest", "--stage", 0)
    before = tree(tmp_path / "dest")
    refused = cli("pull", tmp_path / "b", tmp_path / "dest", "--stage", 1)
    assert refused.code == 1
    assert "holds stages of another set; it differs in partition, stages" in refused.err
    assert tree(tmp_path / "dest") == before
    root = cli("pull", tmp_path / "a", tmp_path / "b", "--stage", 0)
    assert root.code == 1
    assert "is the root of a set" in root.err


def test_missing_or_changed_file_is_refused(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    file = tmp_path / "out/stage-00-of-02/model-layer-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refused = cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", 0)
    assert (refused.code, "bytes, the manifest says" in refused.err) == (1, True)
    file.write_bytes(content.replace(b"layers.0.", b"layers.1.", 1))
    refused = cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", 0)
    assert (refused.code, "its header is not the one in the manifest" in refused.err) == (1, True)
    assert not (tmp_path / "dest").exists()


def test_missing_side_file_is_noticed_first(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    (tmp_path / "out/tokenizer.json").unlink()
    edited = tmp_path / "out/merges.txt"
    for command in (["pull", "--stage", "0"], ["merge"]):
        refused = cli(*command, tmp_path / "out", tmp_path / "dest")
        assert refused.code == 1
        assert "tokenizer.json is missing or was changed" in refused.err
    assert not (tmp_path / "dest").exists()
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    edited.write_bytes(b"X" + edited.read_bytes()[1:])
    for command in (["pull", "--stage", "0"], ["merge"]):
        refused = cli(*command, tmp_path / "out", tmp_path / "dest")
        assert (refused.code, "merges.txt is missing or was changed" in refused.err) == (1, True)
    assert not (tmp_path / "dest").exists()


def test_files_that_nobody_vouches_for_are_replaced(tmp_path: Path, cli: Cli) -> None:
    """Of the right name and size, but of another checkpoint: another training step, say."""
    source = build(tmp_path / "source")
    other = build(tmp_path / "other", seed=1)
    cli("split", source, tmp_path / "out", "--pp-size", 4)
    cli("split", other, tmp_path / "out2", "--pp-size", 4)
    cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", 0)
    for file in (tmp_path / "out2/stage-01-of-04").glob("model-layer-*"):
        (tmp_path / "dest" / file.name).write_bytes(file.read_bytes())
    assert cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", 1).code == 0
    assert verify(tmp_path / "dest", source=source).ok
    cli("pull", tmp_path / "out", tmp_path / "both", "--stage", "0-1")
    assert tree(tmp_path / "dest") == tree(tmp_path / "both")


def test_sets_do_not_mix_in_one_directory(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "a", "--pp-size", 2)
    cli("split", source, tmp_path / "b", "--pp-size", 4)
    cli("merge", tmp_path / "a", tmp_path / "merged")
    cli("pull", tmp_path / "a", tmp_path / "pulled", "--stage", 0)
    for command in (
        ["merge", tmp_path / "a", tmp_path / "pulled"],
        ["merge", tmp_path / "a", tmp_path / "b"],
        ["pull", tmp_path / "a", tmp_path / "merged", "--stage", "0"],
        ["pull", tmp_path / "a", tmp_path / "b/stage-01-of-04", "--stage", "0"],
    ):
        before = tree(tmp_path)
        assert cli(*command).code in (1, 2)
        assert tree(tmp_path) == before


def test_pulling_more_repairs_what_is_there(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out, dest = tmp_path / "out", tmp_path / "dest"
    cli("split", source, out, "--pp-size", 3)
    cli("pull", out, dest, "--stage", "0-1")
    before = tree(dest)
    (dest / "vocab.json").unlink()
    result = cli("pull", out, dest, "--stage", 1)
    assert (result.code, "manifests written anew" in result.out) == (0, True)
    assert tree(dest) == before
    (dest / "model-layer-00000.safetensors").unlink()
    document = json.loads(cli("pull", out, dest, "--stage", 1, "--json").out)
    assert (document["linked"], document["present"]) == (1, [0, 1])
    assert tree(dest) == before
    (dest / "model-layer-00000.safetensors").unlink()
    refused = cli("pull", out / "stage-02-of-03", dest, "--stage", 2)
    assert refused.code == 1
    assert "lacks model-layer-00000.safetensors of a stage that it holds" in refused.err


def test_usage(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    for stage in ("2", "x", "1-0", "", "-1", "0-9999999999", "all,x"):
        assert cli("pull", tmp_path / "out", tmp_path / "dest", "--stage", stage).code == 2
    assert cli("pull", tmp_path / "out", tmp_path / "dest").code == 2
    assert cli("pull", source, tmp_path / "dest", "--stage", 0).code == 1
    assert not (tmp_path / "dest").exists()
