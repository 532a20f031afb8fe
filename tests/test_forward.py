"""`reshard forward`: the MoE blocks of a stage, run and timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard import build_plan, open_checkpoint, split
from reshard.runtime import MoeBlock
from reshard.runtime.measure import LayerTime, Rates
from tests.checkpoints import build
from tests.conftest import Cli, refused


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of two stages: layers 0 to 3, and 4 to 7."""
    root = tmp_path_factory.mktemp("forward")
    build(root / "source", "qwen3_5_moe", weights="mixed")
    split(build_plan(open_checkpoint(root / "source"), 2), root / "out")
    return root / "out"


def document(cli: Cli, *arguments: object) -> dict[str, Any]:
    result = cli("forward", *arguments, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_every_sparse_layer_of_the_stage_is_run_and_checked(cli: Cli, out: Path) -> None:
    found = document(cli, out / "stage-01-of-02", "--device", "cpu", "--tokens", 9, "--check")
    assert (found["stage"], found["pp_size"], found["tokens"]) == (1, 2, 9)
    assert found["device"] == "cpu" and found["dtype"] == "bfloat16" and found["ok"]
    assert [layer["layer"] for layer in found["layers"]] == [4, 5, 6, 7]
    for layer in found["layers"]:
        assert layer["backend"] == "grouped" and layer["ok"]
        assert 0 < layer["error"] < layer["error_limit"]
        assert layer["seconds"] > 0 and layer["roofline"] > 0
        assert 2 <= layer["distinct_experts"] <= 8


def test_bytes_and_flop_are_those_of_the_experts_that_were_hit(cli: Cli, out: Path) -> None:
    """One token goes to k = 2 experts: H 32, I 24, shared expert 40, E 8, bfloat16."""
    found = document(cli, out / "stage-00-of-02", "--layer", 3, "--tokens", 1)
    (layer,) = found["layers"]
    assert layer["distinct_experts"] == 2
    weights = 2 * 3 * 32 * 24 + 3 * 32 * 40 + 8 * 32
    activations = 2 * 32 + 2 * 2 * (24 + 32)
    assert layer["bytes"] == 2 * (weights + activations)
    assert layer["flop"] == 6 * 2 * 32 * 24 + 6 * 32 * 40 + 2 * 32 * 8


def test_the_table_says_that_it_ran_on_the_cpu(cli: Cli, out: Path) -> None:
    result = cli("forward", out / "stage-01-of-02", "--layer", 5, "--backend", "reference")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("stage 1 of 2, qwen3_5_moe, 1 layer: 64 tokens, bfloat16, on cpu")
    assert lines[1] == "it ran on the CPU: this says nothing about a GPU"
    assert lines[3].split()[:3] == ["layer", "backend", "experts"]
    assert lines[4].split()[:2] == ["5", "reference"] and lines[4].split()[-1] == "-"


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_wrong_layer_fails(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    right = MoeBlock.__call__

    def wrong(self: MoeBlock, hidden: torch.Tensor) -> torch.Tensor:
        scale = factor if self.layer == 6 and self.backend != "reference" else 1
        return right(self, hidden) * scale

    monkeypatch.setattr(MoeBlock, "__call__", wrong)
    result = cli("forward", out / "stage-01-of-02", "--check")
    assert result.code == 1
    assert "layer 6 is wrong" in result.out and "layer 5 is wrong" not in result.out
    result = cli("forward", out / "stage-01-of-02", "--check", "--json")
    assert result.code == 1
    layers = json.loads(result.out, parse_constant=pytest.fail)["layers"]
    assert [layer["ok"] for layer in layers] == [True, True, False, True]


def test_what_cannot_be_run_is_refused(cli: Cli, out: Path, tmp_path: Path) -> None:
    stage = out / "stage-01-of-02"
    result = cli("forward", stage, "--layer", 2)
    assert result.code == 2 and "layer 2 belongs to stage 0 of 2" in result.err
    refused(cli("forward", tmp_path / "nowhere"), "no such directory")
    for arguments in (("--backend", "fast"), ("--device", "tpu"), ("--tokens", 0)):
        assert cli("forward", stage, *arguments).code == 2
    assert cli("forward", out).code == 2  # which stage?
    assert cli("forward", out, "--stage", 1, "--layer", 4, "--layer", 4).code == 0
    build(tmp_path / "dense", "qwen3_5")
    split(build_plan(open_checkpoint(tmp_path / "dense"), 1), tmp_path / "dense-pp1")
    refused(cli("forward", tmp_path / "dense-pp1" / "stage-00-of-01"), "has no MoE layers")


def test_zeros_equal_zeros(cli: Cli, tmp_path: Path) -> None:
    """A layer whose output is 0 is right if the reference says 0 too."""
    build(tmp_path / "in", "qwen3_5_moe", layers=1, mtp=None)
    split(build_plan(open_checkpoint(tmp_path / "in"), 1), tmp_path / "out", checksums=False)
    stage = tmp_path / "out" / "stage-00-of-01"
    weights = stage / "model-layer-00000.safetensors"
    length = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    weights.write_bytes(weights.read_bytes()[:length] + bytes(weights.stat().st_size - length))
    found = document(cli, stage, "--check", "--tokens", 3)
    assert found["layers"][0]["error"] == 0.0


def test_no_cuda_device_is_an_error_only_if_asked_for(cli: Cli, out: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    refused(cli("forward", out / "stage-01-of-02", "--device", "cuda"), "no CUDA device")


def test_the_longer_of_both_times_is_the_bound() -> None:
    layer = LayerTime(0, "triton", 0.02, 1000, 100, 1, None, 1)
    assert layer.bound(Rates(1e5, 1e5)) == "memory"
    assert layer.roofline(Rates(1e5, 1e5)) == pytest.approx(0.5)
    assert layer.bound(Rates(1e5, 1e4)) == "memory"
    assert layer.bound(Rates(1e6, 1e4)) == "compute"
    assert layer.roofline(Rates(1e6, 1e4)) == pytest.approx(0.5)
