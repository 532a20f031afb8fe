"""Verifying: every way in which a set can be wrong is found and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import build, read_file, write_tensors
from tests.conftest import Cli, tree

LAYER = "stage-01-of-02/model-layer-00006.safetensors"


def problems(cli: Cli, *arguments: object) -> list[tuple[str, str]]:
    result = cli("verify", *arguments, "--json")
    document = json.loads(result.out)
    assert result.code == (0 if document["ok"] else 1)
    assert document["ok"] == (not document["problems"])
    return [(problem["file"], problem["problem"]) for problem in document["problems"]]


@pytest.fixture
def made(tmp_path: Path, cli: Cli) -> Path:
    build(tmp_path / "source")
    cli("split", tmp_path / "source", tmp_path / "out", "--pp-size", 2)
    return tmp_path / "out"


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"layers.6.", b"layers.7.", 1))


def edit(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def drop_an_index_entry(path: Path) -> None:
    edit(path, lambda document: document["weight_map"].popitem())  # type: ignore[attr-defined]


def other_total(path: Path) -> None:
    edit(path, lambda document: document["metadata"].update(total_size=1))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("file", "damage", "found"),
    [
        (LAYER, lambda p: flip(p, -1), "sha256 is"),
        (LAYER, lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes, the manifest says"),
        (LAYER, lambda p: p.write_bytes(b""), "0 bytes, the manifest says"),
        (LAYER, Path.unlink, "no such file"),
        (LAYER, rename_tensor, "its header is not the one in the manifest"),
        (LAYER, lambda p: flip(p, 4000), "header"),
        ("config.json", lambda p: flip(p, -3), "its sha256 is not the manifest's"),
        ("stage-00-of-02/tokenizer.json", Path.unlink, "no such file"),
        ("stage-00-of-02/merges.txt", lambda p: p.write_bytes(b""), "has 0 bytes"),
        ("model.safetensors.index.json", drop_an_index_entry, "does not match the files here"),
        ("stage-00-of-02/model.safetensors.index.json", other_total, "total_size is 1"),
        ("stage-00-of-02/model.safetensors.index.json", Path.unlink, "no such file"),
        ("stage-00-of-02/reshard.json", Path.unlink, "is not a bundle"),
        ("stage-00-of-02/reshard.json", lambda p: p.write_bytes(b"{"), "is not valid JSON"),
        ("stage-00-of-02/x.safetensors", lambda p: p.write_bytes(b""), "not part of the set"),
        ("stage-00-of-02/.reshard-tmp-1-2", lambda p: p.write_bytes(b""), "was killed"),
        ("stage-00-of-03", Path.mkdir, "is not part of the set"),
    ],
)
def test_damage_is_found_and_named(
    made: Path, cli: Cli, file: str, damage: Callable[[Path], object], found: str
) -> None:
    assert problems(cli, made) == []
    damage(made / file)
    told = problems(cli, made)
    assert [name for name, _ in told] == [file] * len(told)
    assert found in told[0][1]


def test_missing_stage_directory_is_one_problem(made: Path, cli: Cli) -> None:
    shutil.rmtree(made / "stage-01-of-02")
    assert problems(cli, made) == [("stage-01-of-02", "is missing")]
    source = made.parent / "source"
    assert problems(cli, made, "--source", source) == [("stage-01-of-02", "is missing")]


def test_stage_of_another_set_is_noticed(tmp_path: Path, made: Path, cli: Cli) -> None:
    cli("split", tmp_path / "source", tmp_path / "b", "--pp-size", 2, "--engine", "vllm")
    shutil.rmtree(made / "stage-00-of-02")
    shutil.copytree(tmp_path / "b/stage-00-of-02", made / "stage-00-of-02")
    assert problems(cli, made) == [
        ("stage-00-of-02/reshard.json", "is of another set: differs in engine, partition")
    ]


@pytest.mark.parametrize("kind", ["stage", "pulled"])
def test_stage_directories_and_pulled_ones(tmp_path: Path, made: Path, cli: Cli, kind: str) -> None:
    directory = made / "stage-01-of-02"
    if kind == "pulled":
        directory = tmp_path / "pulled"
        cli("pull", made, directory, "--stage", "1")
    assert problems(cli, directory, "--source", tmp_path / "source") == []
    flip(directory / "model-head.safetensors", -1)
    assert [file for file, _ in problems(cli, directory)] == ["model-head.safetensors"]


def test_source_comparison_names_the_tensor(tmp_path: Path, made: Path, cli: Cli) -> None:
    source = tmp_path / "source"
    assert problems(cli, made, "--source", source) == []
    shard = min(source.glob("*.safetensors"))
    tensors = read_file(shard)
    layer = next(name for name in tensors if ".layers.5." in name)
    dtype, shape, data = tensors[layer]
    tensors[layer] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
    reshaped = next(
        name
        for name, (_, shape, _) in tensors.items()
        if ".layers.6." in name and shape != shape[::-1]
    )
    dtype, shape, data = tensors[reshaped]
    tensors[reshaped] = (dtype, shape[::-1], data)
    gone = next(name for name in tensors if ".layers.7." in name)
    del tensors[gone]
    write_tensors(shard, tensors)
    edit(
        source / "model.safetensors.index.json",
        lambda document: document["weight_map"].pop(gone),  # type: ignore[attr-defined]
    )
    stage = "stage-01-of-02"
    assert sorted(problems(cli, made, "--source", source)) == [
        (f"{stage}/model-layer-00005.safetensors", f"{layer}: bytes differ"),
        (f"{stage}/model-layer-00006.safetensors", f"{reshaped}: dtype or shape differ"),
        (f"{stage}/model-layer-00007.safetensors", f"{gone} is not in the source"),
    ]


def test_source_comparison_notices_what_the_set_lacks(tmp_path: Path, cli: Cli) -> None:
    """The set was split before the checkpoint got its mtp weights, or from an incomplete copy."""
    source = build(tmp_path / "source", mtp=None)
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    cli("split", source, tmp_path / "part", "--pp-size", 2, "--stage", "0")
    fuller = build(tmp_path / "fuller", mtp="fused")
    found = problems(cli, tmp_path / "out", "--source", fuller)
    assert found == [(".", "model-mtp: in the source, not in the set")]
    assert problems(cli, tmp_path / "part", "--source", fuller) == []
    assert problems(cli, tmp_path / "out", "--source", source) == []


@pytest.mark.parametrize(
    ("family", "made_for", "engine", "lacking"),
    [
        ("qwen3_5_moe", "sglang", "sglang", []),
        ("qwen3_5_moe", "vllm", "sglang", []),
        ("qwen3_5_moe", "sglang", "vllm", ["embed on stages 1,"]),
        ("qwen3_vl_moe", "sglang", "vllm", ["embed on stages 1, 2,", "head on stages 0, 1,"]),
        ("qwen3_vl_moe", "vllm", "sglang", []),
    ],
)
def test_does_the_set_serve_the_engine(
    tmp_path: Path, cli: Cli, family: str, made_for: str, engine: str, lacking: list[str]
) -> None:
    source = build(tmp_path / "source", family)
    options = ("--pp-size", 3, "--engine", made_for, "--layers", "3,3,2")
    cli("split", source, tmp_path / "out", *options)
    found = problems(cli, tmp_path / "out", "--engine", engine)
    assert len(found) == len(lacking)
    for (file, problem), expected in zip(found, lacking, strict=True):
        assert file == "."
        assert f"needs {expected}" in problem
    assert cli("verify", tmp_path / "out", "--engine", "tgi").code == 2


def test_write_checksums_fills_what_is_missing(tmp_path: Path, made: Path, cli: Cli) -> None:
    out = tmp_path / "bare"
    cli("split", tmp_path / "source", out, "--pp-size", 2, "--no-checksum")
    result = cli("verify", out)
    assert result.code == 0
    assert "files without a checksum: 12" in result.err
    manifest = json.loads((out / "reshard.json").read_bytes())
    assert not any(f["sha256"] for stage in manifest["stages"] for f in stage["files"])
    assert cli("verify", out, "--write-checksums").code == 0
    assert tree(out) == tree(made)
    before = {path: path.stat().st_ino for path in out.rglob("*.safetensors")}
    flip(out / LAYER, -1)
    assert [file for file, _ in problems(cli, out, "--write-checksums")] == [LAYER]
    assert before == {path: path.stat().st_ino for path in out.rglob("*.safetensors")}


def test_checksums_of_a_damaged_set_are_not_written(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 2, "--no-checksum")
    (out / LAYER).unlink()
    before = tree(out)
    assert cli("verify", out, "--write-checksums").code == 1
    assert tree(out) == before


def test_hard_links_are_read_once_and_copies_each(tmp_path: Path, made: Path, cli: Cli) -> None:
    replica = made / "stage-01-of-02" / "model-embed.safetensors"
    first = made / "stage-00-of-02" / "model-embed.safetensors"
    assert replica.samefile(first)
    content = replica.read_bytes()
    replica.unlink()
    replica.write_bytes(content)
    assert problems(cli, made) == []
    flip(replica, -1)
    assert [file for file, _ in problems(cli, made)] == ["stage-01-of-02/model-embed.safetensors"]


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"format_version": 99}', "nonsense", '{"a":1,"a":2}']
)
def test_unreadable_manifest(made: Path, cli: Cli, content: str) -> None:
    (made / "reshard.json").write_text(content)
    result = cli("verify", made)
    assert result.code == 1
    assert result.err.startswith("error: reshard.json")
    assert "Traceback" not in result.err


def hostile_manifests() -> list[tuple[str, Callable[[dict[str, object]], None], str]]:
    def name(file: str) -> Callable[[dict[str, object]], None]:
        def change(manifest: dict[str, object]) -> None:
            manifest["stages"][0]["files"][0]["name"] = file  # type: ignore[index]

        return change

    def side(file: str) -> Callable[[dict[str, object]], None]:
        def change(manifest: dict[str, object]) -> None:
            manifest["side_files"][0]["name"] = file  # type: ignore[index]

        return change

    def layers(manifest: dict[str, object]) -> None:
        manifest["stages"][0]["end_layer"] = 10**15  # type: ignore[index]

    return [
        ("up", name("../../etc/passwd.safetensors"), "is not the name of a bundle's weight file"),
        ("absolute", name("/etc/x.safetensors"), "is not the name of a bundle's weight file"),
        ("side up", side("../config.json"), "is not an acceptable side file name"),
        ("side slash", side("a/b"), "is not an acceptable side file name"),
        ("side nul", side("a\0b"), "is not an acceptable side file name"),
        ("side manifest", side("reshard.json"), "is not an acceptable side file name"),
        ("side weights", side("x.safetensors"), "is not an acceptable side file name"),
        ("layers", layers, "layer ranges of the stages do not fit"),
        ("extra", lambda m: m.update(extra=1), "missing or unknown fields: extra"),
        ("text", lambda m: m.update(present="0"), "is not what belongs here"),
        ("absent stage", lambda m: m.update(present=[7]), "present names no stage of the set"),
        ("negative", lambda m: m.update(present=[-1]), "is not what belongs here"),
        ("replicas", lambda m: m["stages"][1].update(replicas=["foo"]), "replicas of stage 1"),  # type: ignore[index]
        ("no stages", lambda m: m.update(stages=[]), "there are no stages"),
        ("edited", lambda m: m["engine"].update(name="vllm"), "the content gives"),  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in hostile_manifests()],
    ids=[case[0] for case in hostile_manifests()],
)  # fmt: skip
def test_hostile_manifest(
    tmp_path: Path, made: Path, cli: Cli, change: Callable[[dict[str, object]], None], message: str
) -> None:
    edit(made / "reshard.json", change)
    for command in (
        ["verify", made],
        ["merge", made, tmp_path / "dest"],
        ["pull", made, tmp_path / "dest", "--stage", "0"],
        ["inspect", made],
        ["split", made, tmp_path / "dest", "--pp-size", "1"],
    ):
        result = cli(*command)
        assert result.code == 1
        assert message in result.err
    assert not (tmp_path / "dest").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]
