"""Splitting: every tensor arrives, byte for byte, in the stage that needs it and in no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reshard import build_plan, open_checkpoint, split, verify
from reshard.finish import Outcome
from tests.checkpoints import FAMILIES, WEIGHTS, Blob, build, read_dir, read_file
from tests.conftest import Cli, tree

LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.([0-9]+)\.")


def run(source: Path, out: Path, pp_size: int, **options: object) -> Outcome:
    return split(build_plan(open_checkpoint(source), pp_size, **options), out)  # type: ignore[arg-type]


def stages(out: Path) -> list[dict[str, Blob]]:
    return [read_dir(directory) for directory in sorted(out.glob("stage-*"))]


def union(out: Path) -> dict[str, Blob]:
    tensors: dict[str, Blob] = {}
    for stage in stages(out):
        for name, tensor in stage.items():
            assert tensors.setdefault(name, tensor) == tensor, name
    return tensors


def checkpoints() -> list[object]:
    cases = []
    for family in FAMILIES:
        for weights in WEIGHTS:
            for text_only in (False, True):
                if text_only and family == "qwen3_moe":
                    continue
                name = f"{family}{'_text' if text_only else ''}-{weights}"
                cases.append(pytest.param(family, weights, text_only, id=name))
    return cases


@pytest.mark.parametrize(("family", "weights", "text_only"), checkpoints())
def test_every_family_and_weight_format(
    tmp_path: Path, family: str, weights: str, text_only: bool
) -> None:
    source = build(tmp_path / "source", family, weights=weights, text_only=text_only)
    original = read_dir(source)
    for engine, pp_size in (("sglang", 2), ("vllm", 3)):
        if family.startswith("qwen3_vl") and pp_size == 3:
            pp_size = 2  # stage 0 must hold the layers that receive vision features
        out = tmp_path / f"{engine}-{pp_size}"
        run(source, out, pp_size, engine=engine)
        assert union(out) == original
        counts = json.loads((out / "reshard.json").read_bytes())["partition"]["layers"]
        for number, stage in enumerate(stages(out)):
            first = sum(counts[:number])
            layers = {int(m.group(1)) for name in stage if (m := LAYER.match(name))}
            assert layers == set(range(first, first + counts[number]))
            visual = any(name.startswith("model.visual.") for name in stage)
            assert visual == (number == 0 and not text_only and family != "qwen3_moe")
        report = verify(out, source=open_checkpoint(source), engine=engine)
        assert report.problems == ()
        assert report.tensors == len(original)


@pytest.mark.parametrize("pp_size", range(1, 9))
def test_every_pipeline_size(tmp_path: Path, pp_size: int) -> None:
    source = build(tmp_path / "source")
    run(source, tmp_path / "out", pp_size)
    assert union(tmp_path / "out") == read_dir(source)


def test_mtp_and_its_embedding_go_to_the_last_stage(tmp_path: Path) -> None:
    source = build(tmp_path / "source", mtp="per_expert")
    run(source, tmp_path / "out", 4)
    *others, last = stages(tmp_path / "out")
    mtp = {name for name in read_dir(source) if name.startswith("mtp.")}
    assert len(mtp) == 41
    assert mtp <= last.keys()
    assert not any(mtp & stage.keys() for stage in others)
    embed = "model.language_model.embed_tokens.weight"
    assert [embed in stage for stage in (*others, last)] == [True, False, False, True]
    assert "lm_head.weight" in last
    assert "model.language_model.norm.weight" in last


@pytest.mark.parametrize(("pp_size", "copies"), [(1, 1), (2, 2), (4, 2)])
def test_tied_embedding_is_replicated_under_its_own_name(
    tmp_path: Path, cli: Cli, pp_size: int, copies: int
) -> None:
    source = build(tmp_path / "source", tied=True, mtp=None)
    result = cli("split", source, tmp_path / "out", "--pp-size", pp_size, "--json")
    document = json.loads(result.out)
    embed = "model.language_model.embed_tokens.weight"
    found = [stage[embed] for stage in stages(tmp_path / "out") if embed in stage]
    assert len(found) == copies
    size = len(found[0][2])
    expected = [{"component": "embed", "stage": pp_size - 1, "bytes": size}] * (copies - 1)
    assert document["replicated"] == expected
    total = sum(stage["bytes"] for stage in document["stages"])
    assert total == document["source"]["bytes"] + size * (copies - 1)


def test_exclusions_are_named_and_inherited(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    first = cli(
        "split", source, tmp_path / "a", "--pp-size", 4, "--json", "--exclude", "mtp",
        "--exclude", "visual",
    )  # fmt: skip
    names = [excluded["name"] for excluded in json.loads(first.out)["excluded"]]
    assert names == ["mtp", "visual"]
    again = cli("split", tmp_path / "a", tmp_path / "b", "--pp-size", 2, "--json")
    assert json.loads(again.out)["excluded"] == json.loads(first.out)["excluded"]
    kept = {
        name: tensor
        for name, tensor in read_dir(source).items()
        if not name.startswith(("mtp.", "model.visual."))
    }
    assert union(tmp_path / "a") == union(tmp_path / "b") == kept
    embed = "model.language_model.embed_tokens.weight"
    assert [embed in stage for stage in stages(tmp_path / "a")] == [True, False, False, False]


@pytest.mark.parametrize("component", ["visual", "embed", "head"])
def test_replicate_puts_a_component_on_every_stage(tmp_path: Path, component: str) -> None:
    source = build(tmp_path / "source")
    run(source, tmp_path / "out", 3, replicate=(component,))
    files = [d / f"model-{component}.safetensors" for d in sorted(tmp_path.glob("out/stage-*"))]
    assert len({file.stat().st_ino for file in files}) == 1
    assert verify(tmp_path / "out", source=open_checkpoint(source)).ok


def test_weight_files_are_canonical(tmp_path: Path) -> None:
    """The same tensors give the same files, however the source, the stages and the run look."""
    source = build(tmp_path / "a", shards=4)
    other = build(tmp_path / "b", shards=3, metadata=None)
    run(source, tmp_path / "one", 1)
    run(other, tmp_path / "five", 5, engine="vllm")
    split(build_plan(open_checkpoint(source), 8), tmp_path / "eight", jobs=1, checksums=False)
    files = [
        {path.name: path.read_bytes() for path in out.rglob("*.safetensors")}
        for out in (tmp_path / "one", tmp_path / "five", tmp_path / "eight")
    ]
    assert files[0] == files[1] == files[2]
    assert len(files[0]) == 12
    for name, content in files[0].items():
        header = 8 + int.from_bytes(content[:8], "little")
        assert header % 4096 == 0, name
        assert json.loads(content[8:header])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["bf16_per_expert", "fp8", "gptq", "awq", "nvfp4", "mxfp4"])
def test_per_expert_tensors_lie_as_one_fused_tensor(
    tmp_path: Path, family: str, weights: str
) -> None:
    """gate, up, gate, up ... of one suffix are one `[E, 2, *shape]` run of bytes; so is down."""
    source = build(tmp_path / "source", family, weights=weights, experts=8)
    run(source, tmp_path / "out", 2)
    original = read_dir(source)
    checked = 0
    for path in (tmp_path / "out").rglob("model-layer-*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        suffixes = {
            match.group(1)
            for name in header
            if (match := re.search(r"experts\.0\.gate_proj\.(.+)$", name))
        }
        (prefix,) = {
            match.group(1)
            for name in header
            if (match := re.match(r"(.*experts\.)[0-9]+\.gate_proj\.", name))
        }
        for suffix in suffixes:
            for projections in (("gate", "up"), ("down",)):
                names = [f"{prefix}{e}.{p}_proj.{suffix}" for e in range(8) for p in projections]
                begin = start + header[names[0]]["data_offsets"][0]
                stacked = b"".join(original[name][2] for name in names)
                assert content[begin : begin + len(stacked)] == stacked
                checked += 1
    assert checked >= 16


def test_fused_experts_stay_as_they_are(tmp_path: Path) -> None:
    source = build(tmp_path / "source", "qwen3_vl_moe")
    run(source, tmp_path / "out", 2)
    layer = read_file(tmp_path / "out/stage-01-of-02/model-layer-00007.safetensors")
    name = "model.language_model.layers.7.mlp.experts.gate_up_proj"
    assert layer[name] == read_dir(source)[name]
    assert layer[name][1] == (8, 32, 48)


def test_stage_directory_is_an_ordinary_model_directory(tmp_path: Path) -> None:
    source = build(tmp_path / "source", weights="fp8")
    (source / "notes.bin").write_bytes(b"weights of something else")
    (source / "model.gguf").write_bytes(b"the same")
    (source / "x.safetensors.index.json").write_bytes(b"{}")
    (source / "original").mkdir()
    (source / "original" / "x.safetensors").write_bytes(b"nothing")
    run(source, tmp_path / "out", 2)
    carried = {
        path.name
        for path in source.iterdir()
        if path.is_file()
        and path.suffix not in (".safetensors", ".bin", ".gguf")
        and path.name not in ("README.md", ".gitattributes", "x.safetensors.index.json")
    }
    assert {"config.json", "tokenizer.json", "merges.txt", "LICENSE"} <= carried
    for directory in (tmp_path / "out", *(tmp_path / "out").glob("stage-*")):
        present = {p.name for p in directory.iterdir() if p.is_file()}
        weights = {name for name in present if name.endswith(".safetensors")}
        assert present - weights == carried | {"reshard.json"}
        for name in carried - {"model.safetensors.index.json"}:
            assert (directory / name).read_bytes() == (source / name).read_bytes()
        index = json.loads((directory / "model.safetensors.index.json").read_bytes())
        tensors = read_dir(directory) if weights else union(directory)
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(len(t[2]) for t in tensors.values())
        for name, file in index["weight_map"].items():
            assert name in read_file(directory / file)


def test_stages_one_by_one_give_the_same_tree_as_all_at_once(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", tied=True)
    for order in (("2", "0", "1"), ("0,2", "1"), ("1-2", "0-2")):
        out = tmp_path / "-".join(order)
        for stage in order:
            assert cli("split", source, out, "--pp-size", 3, "--stage", stage).code == 0
        cli("split", source, tmp_path / "all", "--pp-size", 3)
        assert tree(out) == tree(tmp_path / "all")


def test_partial_set_names_present_stages_only(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    out = tmp_path / "out"
    cli("split", source, out, "--pp-size", 4, "--stage", 1, "--stage", "3")
    manifest = json.loads((out / "reshard.json").read_bytes())
    assert manifest["present"] == [1, 3]
    hashed = [all(f["sha256"] for f in stage["files"]) for stage in manifest["stages"]]
    assert hashed == [False, True, False, True]
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    assert {file.partition("/")[0] for file in index["weight_map"].values()} == {
        "stage-01-of-04",
        "stage-03-of-04",
    }
    assert verify(out).ok
    refused = cli("plan", out, "--pp-size", 2)
    assert refused.code == 1
    assert "stages 0, 2 are not here" in refused.err


def test_equal_tensors_are_both_kept(tmp_path: Path) -> None:
    from tests.checkpoints import write_tensors

    source = build(tmp_path / "source", shards=1, index=False)
    tensors = read_dir(source)
    prefix = "model.language_model.layers.0."
    tensors[f"{prefix}post_attention_layernorm.weight"] = tensors[f"{prefix}input_layernorm.weight"]
    write_tensors(source / "model.safetensors", tensors)
    run(source, tmp_path / "out", 2)
    assert union(tmp_path / "out") == tensors


def test_every_dtype_passes_through(tmp_path: Path) -> None:
    from tests.checkpoints import write_tensors

    source = build(tmp_path / "source", shards=1, index=False)
    tensors = read_dir(source)
    odd: dict[str, Blob] = {
        "F8_E4M3": ("F8_E4M3", (3, 5), bytes(range(15))),
        "F8_E8M0": ("F8_E8M0", (7,), bytes(range(7))),
        "F4": ("F4", (2, 8), bytes(range(8))),
        "F6_E2M3": ("F6_E2M3", (4,), b"abc"),
        "U16": ("U16", (2,), b"abcd"),
        "U32": ("U32", (2,), b"abcdefgh"),
        "U64": ("U64", (1,), b"abcdefgh"),
        "BOOL": ("BOOL", (4,), b"\x00\x01\x02\x03"),
        "I64": ("I64", (), b"abcdefgh"),
        "C64": ("C64", (1,), b"abcdefgh"),
        "empty": ("F32", (0, 4), b""),
        "scalar": ("F32", (), b"abcd"),
    }
    for name, tensor in odd.items():
        tensors[f"model.language_model.layers.3.extra.{name}"] = tensor
    write_tensors(source / "model.safetensors", tensors)
    run(source, tmp_path / "out", 2)
    assert union(tmp_path / "out") == tensors


def test_dtype_of_the_future_is_copied_with_a_warning(tmp_path: Path, cli: Cli) -> None:
    from tests.checkpoints import write_tensors

    source = build(tmp_path / "source", shards=1, index=False)
    tensors = read_dir(source)
    name = "model.language_model.layers.3.extra"
    write_tensors(source / "model.safetensors", {**tensors, name: ("F31", (3,), b"12345")})
    result = cli("split", source, tmp_path / "out", "--pp-size", 2)
    assert result.code == 0
    assert "dtype F31" in result.err
    content = (tmp_path / "out/stage-00-of-02/model-layer-00003.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:start])[name]
    begin, end = entry.pop("data_offsets")
    assert entry == {"dtype": "F31", "shape": [3]}
    assert content[start + begin : start + end] == b"12345"
