"""Which tensors are w13 and w2, and which way round they lie: proved, or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import tiny_checkpoint as tiny
from examples.tiny_checkpoint import Tensors
from reshard.config import ModelConfig
from reshard.errors import WeightsError
from reshard.header import TensorInfo
from reshard.layout import FUSED, PER_EXPERT, TRANSPOSED
from reshard.runtime import load_stage
from reshard.runtime.config import MoeConfig
from reshard.runtime.expert_layout import ExpertLayout, layout_of
from reshard.runtime.share import Rank, plan_share
from tests import checkpoints
from tests.bundles import make_set, raw

MODULE = "model.language_model.layers.3.mlp.experts"
EXPERTS = 4
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 8]}


def layout(
    family: str,
    tensors: Tensors,
    hidden: int = 32,
    inner: int = 24,
    quantization: Mapping[str, Any] | None = None,
) -> ExpertLayout:
    """The layout of an experts module of these tensors, under a config of these sizes."""
    config = {
        "model_type": family,
        "num_hidden_layers": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "quantization_config": quantization,
    }
    infos: list[TensorInfo] = []
    for name, (dtype, shape) in tensors.items():
        begin = infos[-1].end if infos else 0
        end = begin + tiny.nbytes(dtype, shape)
        infos.append(TensorInfo(f"{MODULE}.{name}", dtype, shape, begin, end, "file"))
    groups = plan_share([infos], Rank(0, 1), Rank(0, 1), None).modules[MODULE].groups
    return layout_of(MODULE, groups, MoeConfig.from_json(config, ModelConfig.from_json(config)))


def fused(gate_up: tuple[int, ...], down: tuple[int, ...], dtype: str = "BF16") -> Tensors:
    return {"gate_up_proj": (dtype, gate_up), "down_proj": (dtype, down)}


def separate(
    gate: tuple[int, ...] = (24, 32),
    down: tuple[int, ...] = (32, 24),
    *,
    suffix: str = "weight",
    experts: int = EXPERTS,
    dtype: str = "BF16",
) -> Tensors:
    return {
        f"{expert}.{proj}_proj.{suffix}": (dtype, down if proj == "down" else gate)
        for expert in range(experts)
        for proj in ("gate", "up", "down")
    }


STRAIGHT = fused((4, 48, 32), (4, 32, 24))
SWAPPED = fused((4, 32, 48), (4, 24, 32))


# --- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_as_the_family_is_released(dtype: str) -> None:
    straight, swapped = ({n: (dtype, s) for n, (_, s) in t.items()} for t in (STRAIGHT, SWAPPED))
    for family in ("qwen3_5_moe", "qwen3_5_moe_text"):
        assert layout(family, straight) == ExpertLayout(FUSED, "", None)
    for family in ("qwen3_vl_moe", "qwen3_vl_moe_text"):
        assert layout(family, swapped) == ExpertLayout(TRANSPOSED, "", None)
    for family in ("qwen3_5_moe", "qwen3_vl_moe", "qwen3_moe"):
        assert layout(family, separate(dtype=dtype)) == ExpertLayout(PER_EXPERT, "weight", None)


@pytest.mark.parametrize(("hidden", "inner"), [(48, 24), (24, 24)], ids=["H = 2I", "H = I"])
def test_where_one_shape_is_ambiguous_model_type_decides(hidden: int, inner: int) -> None:
    straight = fused((4, 2 * inner, hidden), (4, hidden, inner))
    swapped = fused((4, hidden, 2 * inner), (4, inner, hidden))
    assert layout("qwen3_5_moe", straight, hidden, inner) == ExpertLayout(FUSED, "", None)
    assert layout("qwen3_vl_moe", swapped, hidden, inner) == ExpertLayout(TRANSPOSED, "", None)
    # The other tensor tells that these are the other way round; half an answer is none.
    for family, other in (("qwen3_5_moe", swapped), ("qwen3_vl_moe", straight)):
        with pytest.raises(WeightsError, match="fit neither each other nor config.json"):
            layout(family, other, hidden, inner)


def test_stored_the_other_way_round_is_accepted_and_said() -> None:
    """transformers 5 saves Qwen3-VL anew as `[E, 2I, H]`."""
    found = layout("qwen3_vl_moe", STRAIGHT)
    assert (found.form, found.weight, found.scale) == (FUSED, "", None)
    assert found.note == f"{MODULE} is stored as fused, other than qwen3_vl_moe is released"
    found = layout("qwen3_5_moe", SWAPPED)
    assert found.form == TRANSPOSED
    assert found.note is not None and "stored as fused_transposed" in found.note


def test_qwen3_vl_saved_anew_loads_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoints, "transposed_experts", tiny.fused_experts)
    stage = load_stage(make_set(tmp_path, "qwen3_vl_moe"), stage=1, device="cpu")
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "reshard"):
        experts = stage.experts[5]
    (record,) = caplog.records
    assert "layers.5.mlp.experts is stored as fused, other than qwen3_vl_moe" in record.message
    prefix = "model.language_model.layers.5.mlp.experts."
    assert experts.w13.shape == (8, 48, 32) and experts.w13.is_contiguous()
    assert torch.equal(experts.w13, stage.tensors[f"{prefix}gate_up_proj"])
    assert raw(experts.w2) == raw(stage.tensors[f"{prefix}down_proj"])


def test_fp8_has_a_scale_for_each_block() -> None:
    """24 rows are two blocks of 16, of gate and of up alike; 48 rows would be three."""
    one_by_one = separate(dtype="F8_E4M3") | separate((2, 4), (2, 3), suffix="weight_scale_inv")
    found = layout("qwen3_moe", one_by_one, quantization=BLOCKS)
    assert found == ExpertLayout(PER_EXPERT, "weight", "weight_scale_inv")
    scales = {
        "gate_up_proj_scale_inv": ("BF16", (4, 4, 4)),
        "down_proj_scale_inv": ("BF16", (4, 2, 3)),
    }
    together: Tensors = fused((4, 48, 32), (4, 32, 24), "F8_E4M3") | scales
    found = layout("qwen3_5_moe", together, quantization=BLOCKS)
    assert found == ExpertLayout(FUSED, "", "_scale_inv")


# --- what is refused ------------------------------------------------------------------------------


def refused(family: str, tensors: Tensors, *words: str, **config: Any) -> None:
    """An error that names the module and says this."""
    with pytest.raises(WeightsError, match=re.escape(MODULE)) as caught:
        layout(family, tensors, **config)
    assert caught.value.hint
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("family", "tensors"),
    [
        ("qwen3_5_moe", fused((4, 48, 32), (4, 24, 32))),  # each in its own way
        ("qwen3_vl_moe", fused((4, 32, 48), (4, 32, 24))),
        ("qwen3_5_moe", fused((5, 48, 32), (5, 32, 24))),  # experts
        ("qwen3_5_moe", fused((4, 48, 32), (5, 32, 24))),
        ("qwen3_5_moe", fused((4, 24, 32), (4, 32, 24))),  # gate without up
        ("qwen3_5_moe", fused((4, 48, 30), (4, 30, 24))),  # hidden size
        ("qwen3_5_moe", fused((48, 32), (32, 24))),  # axes
        ("qwen3_moe", separate((24, 30), (30, 24))),
        ("qwen3_moe", separate((32, 24), (24, 32))),  # transposed one by one
        ("qwen3_moe", separate((24, 32), (24, 32))),
        ("qwen3_moe", separate(experts=5)),
        ("qwen3_moe", separate(experts=3)),
    ],
)
def test_shapes_that_contradict_each_other_or_the_config(family: str, tensors: Tensors) -> None:
    """Both shapes are named, as they are found, and what config.json says."""
    refused(
        family,
        tensors,
        *(str(shape)[1:-1] for _, shape in tensors.values()),
        "4 experts, hidden size 32, expert size 24",
        family,
    )


def test_separate_experts_that_lack_a_tensor() -> None:
    lacking = separate()
    del lacking["2.up_proj.weight"]
    refused("qwen3_moe", lacking, "gate_up_proj tensors that differ", "or some lack one")
    lacking = separate()
    del lacking["3.down_proj.weight"]
    refused("qwen3_moe", lacking, "fit neither", "(3, 32, 24)")
    lacking = separate()
    del lacking["1.down_proj.weight"]
    refused("qwen3_moe", lacking, "down_proj tensors that differ")


def test_separate_experts_that_differ() -> None:
    odd: Tensors = {"1.gate_proj.weight": ("BF16", (24, 30))}
    refused("qwen3_moe", separate() | odd, "differ in dtype or shape")
    odd = {"1.gate_proj.weight": ("F16", (24, 32))}
    refused("qwen3_moe", separate() | odd, "stored as weight BF16, weight F16")


def test_a_projection_is_missing() -> None:
    for name, tensor in STRAIGHT.items():
        other = "down_proj" if name == "gate_up_proj" else "gate_up_proj"
        refused("qwen3_5_moe", {name: tensor}, f"there is no {other} beside the other")
    downs = {name: tensor for name, tensor in separate().items() if ".down_" in name}
    refused("qwen3_moe", downs, "there is no gate_up_proj beside the other")


@pytest.mark.parametrize("dtype", ["I64", "U8", "F8_E8M0", "C64"])
def test_scales_that_are_no_numbers_of_ours(dtype: str) -> None:
    odd: Tensors = {
        name: (dtype, shape)
        for name, (_, shape) in separate((2, 4), (2, 3), suffix="weight_scale_inv").items()
    }
    weights = separate(dtype="F8_E4M3")
    refused("qwen3_moe", weights | odd, f"weight_scale_inv {dtype}", quantization=BLOCKS)


def test_fused_tensors_beside_separate_ones() -> None:
    """A name like this one is a fused tensor, whatever its suffix looks like."""
    odd: Tensors = {"down_projweight": ("BF16", (4, 32, 24))}
    refused("qwen3_moe", separate() | odd, "its experts are stored as")


def test_tensors_beside_the_weights() -> None:
    """Whatever it is, the forward would leave it out."""
    bias: Tensors = {"gate_up_proj_bias": ("BF16", (4, 48))}
    refused("qwen3_5_moe", STRAIGHT | bias, "_bias BF16")
    scale = separate((1,), (1,), suffix="weight_scale_inv")
    refused("qwen3_moe", separate() | scale, "weight_scale_inv BF16", "weight BF16")


def test_weights_of_two_dtypes() -> None:
    mixed: Tensors = {**STRAIGHT, "down_proj": ("F16", (4, 32, 24))}
    refused("qwen3_5_moe", mixed, "(no suffix) BF16, (no suffix) F16")


FP8 = separate(dtype="F8_E4M3")
SCALES = separate((2, 4), (2, 3), suffix="weight_scale_inv")


@pytest.mark.parametrize(
    "quantization",
    [None, {"quant_method": "fp8"}, {"quant_method": "other", "weight_block_size": [16, 8]}],
)
def test_fp8_whose_blocks_config_does_not_tell(quantization: Mapping[str, Any] | None) -> None:
    refused("qwen3_moe", FP8 | SCALES, "weight F8_E4M3", quantization=quantization)


def test_fp8_without_scales_or_with_others() -> None:
    refused("qwen3_moe", FP8, "weight F8_E4M3", "(fp8)", quantization=BLOCKS)
    other = separate((2, 4), (2, 3), suffix="weight_scale")
    refused("qwen3_moe", FP8 | other, "weight_scale BF16", quantization=BLOCKS)
    e5m2 = separate(dtype="F8_E5M2")
    refused("qwen3_moe", e5m2 | SCALES, "weight F8_E5M2", quantization=BLOCKS)
    whole = fused((4, 48, 32), (4, 32, 24), "F8_E4M3")
    refused("qwen3_5_moe", whole, "(no suffix) F8_E4M3", quantization=BLOCKS)


def test_fp8_with_scales_of_other_blocks() -> None:
    for gate, down in (((1, 4), (2, 3)), ((4, 2), (2, 3)), ((2, 4), (3, 2))):
        scales = separate(gate, down, suffix="weight_scale_inv")
        refused(
            "qwen3_moe",
            FP8 | scales,
            f"({EXPERTS}, 2, {gate[0]}, {gate[1]})",
            f"({EXPERTS}, {down[0]}, {down[1]})",
            "in blocks of 16 x 8",
            "expected (4, 2, 2, 4) and (4, 2, 3)",
            quantization=BLOCKS,
        )
    # Three rows of scales for 48 rows: the middle one would be of gate and of up.
    scales = {
        "gate_up_proj_scale_inv": ("BF16", (4, 3, 4)),
        "down_proj_scale_inv": ("BF16", (4, 2, 3)),
    }
    together: Tensors = fused((4, 48, 32), (4, 32, 24), "F8_E4M3") | scales
    refused("qwen3_5_moe", together, "expected (4, 4, 4)", quantization=BLOCKS)


@pytest.mark.parametrize("block", [[0, 8], [16, -8], [16.0, 8], [True, 8], ["16", "8"]])
def test_blocks_that_are_no_sizes(block: list[Any]) -> None:
    with pytest.raises(WeightsError, match="weight_block_size is"):
        layout("qwen3_moe", FP8 | SCALES, quantization={**BLOCKS, "weight_block_size": block})
