"""Inspecting: what a checkpoint or a set holds, its oddities, and its published checksums."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build, read_dir
from tests.conftest import Cli


def document(cli: Cli, *arguments: object) -> dict[str, Any]:
    result = cli("inspect", *arguments, "--json")
    return {"code": result.code, **json.loads(result.out)}


def test_document(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", weights="fp8", tied=True)
    found = document(cli, source)
    original = read_dir(source)
    assert list(found) == [
        "code", "repo", "commit", "model_type", "num_hidden_layers", "num_experts", "expert_layout",
        "mtp_expert_layout", "quant_method", "tied", "tensors", "bytes", "components", "set",
        "warnings", "notes",
    ]  # fmt: skip
    assert found["model_type"] == "qwen3_5_moe"
    assert (found["num_hidden_layers"], found["num_experts"]) == (8, 8)
    assert (found["quant_method"], found["tied"]) == ("fp8", True)
    assert list(found["components"]) == ["visual", "embed", "layers", "head", "mtp"]
    for key, total in (
        ("tensors", len(original)),
        ("bytes", sum(len(t[2]) for t in original.values())),
    ):
        assert sum(part[key] for part in found["components"].values()) == found[key] == total
    assert found["components"]["embed"]["tensors"] == 1
    assert (found["set"], found["warnings"]) == (None, [])


@pytest.mark.parametrize(
    ("family", "weights", "mtp", "layouts"),
    [
        ("qwen3_5_moe", "bf16", "per_expert", ("fused", "per_expert")),
        ("qwen3_5_moe", "bf16", "fused", ("fused", "fused")),
        ("qwen3_5_moe", "mixed", None, ("mixed", "none")),
        ("qwen3_5_moe", "gptq", "per_expert", ("per_expert", "per_expert")),
        ("qwen3_5_moe", "nvfp4", "fused", ("per_expert", "fused")),
        ("qwen3_vl_moe", "bf16", None, ("fused_transposed", "none")),
        ("qwen3_vl_moe", "bf16_per_expert", None, ("per_expert", "none")),
        ("qwen3_vl", "bf16", None, ("none", "none")),
        ("qwen3_5", "bf16", "fused", ("none", "none")),
        ("qwen3_moe", "bf16", None, ("per_expert", "none")),
    ],
)  # fmt: skip
def test_expert_layouts(
    tmp_path: Path, cli: Cli, family: str, weights: str, mtp: Any, layouts: tuple[str, str]
) -> None:
    source = build(tmp_path / "source", family, weights=weights, mtp=mtp)
    found = document(cli, source)
    assert (found["expert_layout"], found["mtp_expert_layout"]) == layouts
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    again = document(cli, tmp_path / "out")
    assert (again["expert_layout"], again["mtp_expert_layout"]) == layouts


def test_layout_that_engines_do_not_expect_is_a_warning(tmp_path: Path, cli: Cli) -> None:
    """A Qwen3-VL MoE saved anew by transformers has its experts the other way round."""
    source = build(tmp_path / "source", "qwen3_5_moe", mtp=None, text_only=True)
    config = json.loads((source / "config.json").read_bytes())
    config["model_type"] = "qwen3_vl_moe_text"
    config["architectures"] = ["Qwen3VLMoeForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    found = document(cli, source)
    assert found["expert_layout"] == "fused"
    assert (
        "is released as fused_transposed, which is what SGLang and vLLM expect"
        in found["warnings"][0]
    )


def test_ambiguous_shapes_go_by_the_family(tmp_path: Path, cli: Cli) -> None:
    for family, layout in (("qwen3_5_moe", "fused"), ("qwen3_vl_moe", "fused_transposed")):
        source = build(tmp_path / family, family, moe_intermediate_size=16, mtp=None)
        found = document(cli, source)  # hidden size 32 == 2 * 16: gate_up is square
        assert found["expert_layout"] == layout
        assert found["warnings"] == []


def test_oddities_are_warnings(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source", weights="bf16_per_expert", experts=8)
    config = json.loads((source / "config.json").read_bytes())
    config["text_config"]["num_experts"] = 16
    config["text_config"]["num_hidden_layers"] = 9
    del config["architectures"]
    (source / "config.json").write_text(json.dumps(config))
    warnings = document(cli, source)["warnings"]
    module = "model.language_model.layers.0.mlp.experts"
    assert warnings == [
        "config.json has no architectures at its top level; serving engines need it",
        f"{module} has 8 experts, config.json says 16 (9 modules in all)",
        "incomplete: no tensors of layers 8, of 9",
    ]
    refused = cli("plan", source, "--pp-size", 2)
    assert (refused.code, "the checkpoint is incomplete" in refused.err) == (1, True)


def test_set_says_what_it_was_made_for(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    options = ("--pp-size", 3, "--engine", "vllm", "--exclude", "mtp", "--stage", "1")
    cli("split", source, tmp_path / "out", *options)
    found = document(cli, tmp_path / "out")["set"]
    assert len(found.pop("set_id")) == 64
    assert found == {
        "pp_size": 3,
        "present": [1],
        "layers": [3, 3, 2],
        "partition": "vllm",
        "engine": "vllm",
        "engine_version": "0.33.0",
        "source_repo": None,
        "source_commit": None,
        "excluded": ["mtp"],
    }
    shown = cli("inspect", tmp_path / "out").out
    assert "engine version     0.33.0" in shown


def hub_cache(tmp_path: Path) -> Path:
    """A snapshot as huggingface_hub lays it out: links to blobs named by sha256."""
    source = build(tmp_path / "source")
    cache = tmp_path / "models--org--tiny"
    snapshot = cache / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in source.iterdir():
        content = path.read_bytes()
        name = hashlib.sha256(content).hexdigest()
        (cache / "blobs" / name).write_bytes(content)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / name)
    return snapshot


@pytest.mark.parametrize(
    ("cache", "repo"),
    [("models--gpt2", "gpt2"), ("models--a--b--c", None), ("datasets--a--b", None)],
)
def test_names_of_hub_caches(tmp_path: Path, cli: Cli, cache: str, repo: str | None) -> None:
    source = build(tmp_path / cache / "snapshots" / ("0" * 40))
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    facts = json.loads((tmp_path / "out/reshard.json").read_bytes())["source"]
    assert facts["repo"] == repo
    assert facts["directory"] == (None if repo else "0" * 40)


def test_hub_cache_without_a_commit(tmp_path: Path, cli: Cli) -> None:
    snapshot = hub_cache(tmp_path)
    refused = cli("inspect", snapshot.parent.parent)
    assert refused.code == 1
    assert "hint: in a Hugging Face cache, give the directory of a commit below" in refused.err


def test_files_of_a_hub_cache_are_checked_by_their_blobs(tmp_path: Path, cli: Cli) -> None:
    snapshot = hub_cache(tmp_path)
    found = document(cli, snapshot, "--check-hashes")
    assert found["code"] == 0
    assert found["hashes"] == {"checked": 4, "unknown": 0, "problems": []}
    blob = max(snapshot.glob("*.safetensors")).resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    found = document(cli, snapshot, "--check-hashes")
    assert found["code"] == 1
    (problem,) = found["hashes"]["problems"]
    assert problem["problem"].endswith(f"published was {blob.name}")
    assert "3 of 4 files as published" in cli("inspect", snapshot, "--check-hashes").out


def test_hub_cache_splits_and_is_recorded_by_repository_and_commit(
    tmp_path: Path, cli: Cli
) -> None:
    snapshot = hub_cache(tmp_path)
    assert cli("split", snapshot, tmp_path / "out", "--pp-size", 2).code == 0
    source = json.loads((tmp_path / "out/reshard.json").read_bytes())["source"]
    assert source["repo"] == "org/tiny"
    assert source["commit"] == "c" * 40
    assert source["directory"] is None
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_hashes_of_a_set_and_of_an_ordinary_directory(tmp_path: Path, cli: Cli) -> None:
    source = build(tmp_path / "source")
    refused = cli("inspect", source, "--check-hashes")
    assert (refused.code, "no checksums are on record" in refused.err) == (1, True)
    cli("split", source, tmp_path / "out", "--pp-size", 2)
    found = document(cli, tmp_path / "out", "--check-hashes")
    assert found["hashes"] == {"checked": 12, "unknown": 0, "problems": []}
