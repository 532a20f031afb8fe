"""`MoeBlock` on loaded stages, against transformers' own blocks with weights read from the source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from reshard import build_plan, open_checkpoint, split
from reshard.errors import LayerNotHereError, UsageError, WeightsError
from reshard.runtime import MoeBlock, StageWeights, load_stage
from reshard.runtime.fused import Backend
from reshard.runtime.moe import route
from reshard.runtime.weights import Experts
from tests.checkpoints import build

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
HIDDEN = 40
EXACT = 1e-6
ROUNDED = 8e-3 + 1.7e-3
"""Relative errors: in float32, and in bfloat16, where transformers rounds the router's weights, too."""

DEEPSTACK = {"vision_deepstack_visual_indexes": (0,)}
"""Layers that take vision features may not be parted: of Qwen3-VL, only the first here."""

BLOCKS: dict[str, Any] = {
    "qwen3_5_moe": Qwen3_5MoeSparseMoeBlock,
    "qwen3_vl_moe": Qwen3VLMoeTextSparseMoeBlock,
    "qwen3_moe": Qwen3MoeSparseMoeBlock,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the set of bundles made of it."""

    family: str
    source: Path
    out: Path

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        files = self.source.glob("*.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    @cached_property
    def stages(self) -> list[StageWeights]:
        directories = sorted(self.out.glob("stage-*"))
        return [load_stage(directory, device="cpu") for directory in directories]

    def rank(self, stage: int, ep: tuple[int, int], tp: tuple[int, int] = (0, 1)) -> StageWeights:
        return load_stage(self.out, stage=stage, device="cpu", ep=ep, tp=tp)

    def theirs(self, layer: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """transformers' block of a layer, for hidden states of any shape."""
        config = AutoConfig.from_pretrained(self.source).get_text_config()
        config._experts_implementation = "eager"
        block = BLOCKS[self.family](config)
        state = {name: tensor.to(dtype) for name, tensor in self.state(layer).items()}
        block.load_state_dict(state, strict=True, assign=True)

        def run(hidden: Tensor) -> Tensor:
            with torch.no_grad():
                batch = hidden.reshape(1, -1, hidden.shape[-1])
                out: Tensor = block(batch)
            return out.view(hidden.shape)

        return run

    def state(self, layer: int) -> dict[str, Tensor]:
        """The weights of a layer's block under the names of transformers, FP8 ones multiplied out."""
        found = {
            name.rpartition(f".layers.{layer}.mlp.")[2]: tensor.float()
            for name, tensor in self.tensors.items()
            if f".layers.{layer}.mlp." in name and not name.startswith("mtp.")
        }
        for name in [name for name in found if name.endswith("_scale_inv")]:
            scale, name = found.pop(name), name.removesuffix("_scale_inv")
            rows, columns = (torch.arange(size) // 16 for size in found[name].shape)
            found[name] = found[name] * scale[rows[:, None], columns]
            if "shared_expert" in name:  # small: reshard keeps it in the dtype of the model
                found[name] = found[name].to(BF16).float()
        separate = [name for name in found if re.match(r"experts\.\d+\.", name)]
        if separate:
            one = {name: found.pop(name) for name in separate}

            def stack(proj: str) -> Tensor:
                count = len(one) // 3
                return torch.stack([one[f"experts.{n}.{proj}_proj.weight"] for n in range(count)])

            found["experts.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
            found["experts.down_proj"] = stack("down")
        elif found["experts.down_proj"].shape[1] != HIDDEN:
            for name in ("experts.gate_up_proj", "experts.down_proj"):
                found[name] = found[name].transpose(1, 2)
        return found


Models = Callable[..., Model]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints split into two or three stages; each is made once."""
    made: dict[str, Model] = {}

    def model(
        family: str,
        weights: str = "bf16",
        *,
        text_only: bool = False,
        pp: int = 2,
        inner: int = 48,
    ) -> Model:
        key = f"{family} {weights} {text_only} {pp} {inner}"
        if key not in made:
            path = tmp_path_factory.mktemp("model")
            sizes: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": inner}
            if family == "qwen3_5_moe":
                sizes["shared_expert_intermediate_size"] = 2 * inner
            if family == "qwen3_vl_moe":
                sizes |= DEEPSTACK
            build(path / "in", family, weights=weights, text_only=text_only, layers=4, **sizes)
            split(build_plan(open_checkpoint(path / "in"), pp), path / "out", checksums=False)
            made[key] = Model(family, path / "in", path / "out")
        return made[key]

    return model


def states(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)


def off(found: Tensor, expected: Tensor) -> float:
    """The relative error, by the Euclidean norm."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5 fused": {"family": "qwen3_5_moe"},
    "qwen3_5 per expert": {"family": "qwen3_5_moe", "weights": "bf16_per_expert", "pp": 3},
    "qwen3_5 mixed": {"family": "qwen3_5_moe", "weights": "mixed"},
    "qwen3_5 fp8": {"family": "qwen3_5_moe", "weights": "fp8"},
    "qwen3_5 fp8, parts of blocks": {"family": "qwen3_5_moe", "weights": "fp8", "inner": 20},
    "qwen3_5 text only": {"family": "qwen3_5_moe", "text_only": True},
    "qwen3_vl transposed": {"family": "qwen3_vl_moe", "pp": 3},
    "qwen3_vl per expert": {"family": "qwen3_vl_moe", "weights": "bf16_per_expert"},
    "qwen3_vl fp8": {"family": "qwen3_vl_moe", "weights": "fp8"},
    "qwen3_vl text only": {"family": "qwen3_vl_moe", "text_only": True},
    "qwen3": {"family": "qwen3_moe"},
    "qwen3 fp8": {"family": "qwen3_moe", "weights": "fp8"},
}
KIND = pytest.mark.parametrize("kind", KINDS)
ONE_OF_EACH = pytest.mark.parametrize(
    "kind", ["qwen3_5 fused", "qwen3_5 per expert", "qwen3_5 fp8", "qwen3_vl transposed"]
)


# --- the block of transformers --------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "backend"), [(F32, "auto"), (BF16, "auto"), (BF16, "reference")])
@KIND
def test_blocks_are_those_of_transformers(
    models: Models, kind: str, dtype: torch.dtype, backend: Backend
) -> None:
    model, hidden, layers = models(**KINDS[kind]), states(33, dtype=dtype), []
    limit = EXACT if dtype == F32 else ROUNDED
    for stage in model.stages:
        for layer in stage.layers:
            out = MoeBlock(stage, layer, backend)(hidden)
            assert out.dtype == dtype
            assert off(out, model.theirs(layer, dtype)(hidden)) < limit
            layers.append(layer)
    assert layers == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (2, 3, 4), (1, 1), (0,), (2, 0)])
@ONE_OF_EACH
def test_hidden_states_of_any_shape(
    models: Models, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model, hidden = models(**KINDS[kind]), states(*shape, dtype=dtype)
    out = MoeBlock(model.stages[0], 0)(hidden)
    assert out.shape == hidden.shape and out.dtype == dtype
    if hidden.numel():
        assert off(out, model.theirs(0, dtype)(hidden)) < (EXACT if dtype == F32 else ROUNDED)


def test_hidden_states_that_do_not_lie_side_by_side(models: Models) -> None:
    block = MoeBlock(models("qwen3_5_moe").stages[0], 0)
    hidden = states(5, 2).transpose(0, 1)
    assert torch.equal(block(hidden), block(hidden.contiguous()))


@pytest.mark.parametrize("hidden", [torch.zeros(3, 48), torch.zeros(40, 3), torch.zeros(())])
def test_hidden_states_of_another_size(models: Models, hidden: Tensor) -> None:
    block = MoeBlock(models("qwen3_5_moe").stages[0], 0)
    message = f"hidden states of shape {tuple(hidden.shape)} do not end in the hidden size 40"
    with pytest.raises(UsageError, match=re.escape(message)):
        block(hidden)


@KIND
def test_the_shared_expert_is_of_qwen3_5_alone(models: Models, kind: str) -> None:
    model, hidden = models(**KINDS[kind]), states(33)
    block = MoeBlock(model.stages[0], 0)
    if model.family != "qwen3_5_moe":
        assert block.shared_expert is None
        return
    expected = model.theirs(0, F32)(hidden)
    assert off(block(hidden), expected) < EXACT
    shared, block.shared_expert = block.shared_expert, None
    assert shared is not None
    assert off(block(hidden), expected) > 0.2, "without it"
    for wrong in (
        replace(shared, gate_proj=shared.up_proj, up_proj=shared.gate_proj),
        replace(shared, output_gate=torch.zeros_like(shared.output_gate)),
    ):
        block.shared_expert = wrong
        assert off(block(hidden), expected) > 0.02


@ONE_OF_EACH
def test_each_layer_has_weights_of_its_own(models: Models, kind: str) -> None:
    """Else one layer's block would pass for all."""
    model, hidden = models(**KINDS[kind]), states(33)
    blocks = [MoeBlock(stage, layer) for stage in model.stages for layer in stage.layers]
    for block, other in pairwise(blocks):
        assert off(block(hidden), model.theirs(other.layer, F32)(hidden)) > 0.5


def test_the_backend_is_the_one_asked_for(models: Models) -> None:
    stage, hidden = models("qwen3_5_moe", "fp8").stages[0], states(3, dtype=BF16)
    with pytest.raises(WeightsError, match="the grouped backend cannot run these experts: .*FP8"):
        MoeBlock(stage, 0, backend="grouped")(hidden)


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (3, 1), (8, 1), (1, 3), (2, 3), (3, 3)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@ONE_OF_EACH
def test_all_ranks_sum_to_the_whole(
    models: Models, kind: str, dtype: torch.dtype, ep: int, tp: int
) -> None:
    """The shared expert is counted once: a part of it on each tensor-parallel rank of the first."""
    model, hidden = models(**KINDS[kind]), states(2, 9, dtype=dtype)
    stage = len(model.stages) - 1
    layer = model.stages[stage].layers[-1]
    total, shared = torch.zeros_like(hidden, dtype=F64), 0
    for expert_rank in range(ep):
        for tensor_rank in range(tp):
            rank = model.rank(stage, (expert_rank, ep), (tensor_rank, tp))
            block = MoeBlock(rank, layer)
            assert block.experts.intermediate_size == 48 // tp
            shared += block.shared_expert is not None
            total += block(hidden).double()
    assert shared == (tp if model.family == "qwen3_5_moe" else 0)
    limit = EXACT if dtype == F32 else ROUNDED
    assert off(total, model.theirs(layer, dtype)(hidden)) < limit


def test_a_rank_whose_experts_nobody_chose_gives_zeros(models: Models) -> None:
    model = models("qwen3_vl_moe", pp=3)
    rank = model.rank(0, (7, 8))
    hidden, gate = (
        states(9, dtype=BF16),
        rank.tensors["model.language_model.layers.0.mlp.gate.weight"],
    )
    ids, _ = route(hidden, gate, 2)
    unchosen = hidden[(ids != 7).all(-1)]
    assert 0 < len(unchosen)
    assert torch.equal(MoeBlock(rank, 0)(unchosen), torch.zeros_like(unchosen))


# --- routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 4, 8])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_route_takes_the_most_likely_experts(dtype: torch.dtype, top_k: int) -> None:
    hidden, gate = states(33, dtype=dtype), states(8, dtype=BF16)
    ids, weights = route(hidden, gate, top_k)
    assert ids.shape == weights.shape == (33, top_k)
    assert ids.dtype == torch.int64 and weights.dtype == F32
    likely = (hidden @ gate.to(dtype).t()).float().softmax(-1)
    expected = likely.sort(-1, descending=True).values[:, :top_k]
    assert torch.allclose(likely.gather(1, ids), expected, rtol=1e-6, atol=0)
    assert all(len(set(chosen)) == top_k for chosen in ids.tolist())
    assert torch.allclose(weights.sum(-1), torch.ones(33), rtol=0, atol=1e-6)
    assert torch.allclose(weights, expected / expected.sum(-1, keepdim=True), atol=1e-6)


def test_route_in_float64() -> None:
    hidden, gate = states(9, dtype=F64), states(8, dtype=BF16)
    ids, weights = route(hidden, gate, 3)
    likely = (hidden @ gate.double().t()).softmax(-1).gather(1, ids)
    assert weights.dtype == F64
    assert torch.allclose(weights, likely / likely.sum(-1, keepdim=True), rtol=1e-14, atol=0)


def test_route_does_not_overflow() -> None:
    _, weights = route(states(3, dtype=BF16) * 1e4, states(8, dtype=BF16), 2)
    assert weights.isfinite().all() and torch.allclose(weights.sum(-1), torch.ones(3))


# --- what is refused ------------------------------------------------------------------------------


def test_a_layer_of_another_stage(models: Models) -> None:
    first, second = models("qwen3_5_moe").stages
    with pytest.raises(LayerNotHereError, match="^layer 2 belongs to stage 1 of 2; stage 0 has"):
        MoeBlock(first, 2)
    with pytest.raises(LayerNotHereError, match="^layer 0 belongs to stage 0 of 2; stage 1 has"):
        MoeBlock(second, 0)
    for layer in (4, -1):
        with pytest.raises(LayerNotHereError, match=f"^there is no layer {layer}: the model has 4"):
            MoeBlock(second, layer)
    dense = replace(first, experts=Experts({}, lambda layer: None))
    with pytest.raises(LayerNotHereError, match="^layer 0 has no routed experts: it is dense"):
        MoeBlock(dense, 0)


def changed(path: Path, family: str, text_only: bool, **fields: object) -> StageWeights:
    """Stage 1 of a checkpoint whose config.json says something else; None removes a field."""
    sizes: dict[str, Any] = DEEPSTACK if family == "qwen3_vl_moe" else {}
    build(path / "in", family, text_only=text_only, layers=2, experts=4, shards=1, **sizes)
    file = path / "in/config.json"
    document = json.loads(file.read_text())
    text = document.get("text_config", document)
    text |= fields
    for name in [name for name, value in fields.items() if value is None]:
        del text[name]
    file.write_text(json.dumps(document))
    split(build_plan(open_checkpoint(path / "in"), 2), path / "out", checksums=False)
    return load_stage(path / "out", stage=1, device="cpu")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("norm_topk_prob", False, "norm_topk_prob is False; the forward computes true only"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; the forward computes silu only"),
        ("num_experts_per_tok", None, "num_experts_per_tok is None, and running the experts of"),
        ("num_experts_per_tok", 0, "num_experts_per_tok is 0, and running the experts of"),
        ("num_experts_per_tok", "8", "num_experts_per_tok is '8', and running the experts of"),
        ("num_experts_per_tok", True, "num_experts_per_tok is True, and running the experts of"),
        ("num_experts_per_tok", 5, "num_experts_per_tok is 5, of 4 experts"),
        ("moe_intermediate_size", 20, "fit neither each other nor config.json: 4 experts"),
    ],
)
@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("text_only", [False, True])
def test_a_config_that_the_forward_does_not_fit(
    tmp_path: Path, family: str, text_only: bool, field: str, value: object, message: str
) -> None:
    stage = changed(tmp_path, family, text_only, **{field: value})
    assert stage.layer(1), "it loads all the same"
    with pytest.raises(WeightsError, match=message):
        MoeBlock(stage, 1)


@pytest.mark.parametrize("value", [None, 0, 20, "40", -1, False, [], ""])
def test_a_shared_expert_of_another_size(tmp_path: Path, value: object) -> None:
    stage = changed(tmp_path, "qwen3_5_moe", False, shared_expert_intermediate_size=value)
    with pytest.raises(WeightsError, match="shared_expert"):
        MoeBlock(stage, 1)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate.bias",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert.gate_proj.bias",
        "mlp.shared_expert_gate.bias",
        "mlp.other.weight",
    ],
)
def test_tensors_that_the_block_would_leave_out(models: Models, name: str) -> None:
    stage = models("qwen3_5_moe").stages[0]
    prefix = "model.language_model.layers.0."
    more = replace(stage, tensors={**stage.tensors, f"{prefix}{name}": torch.zeros(8)})
    with pytest.raises(
        WeightsError, match=f"layer 0 has {name}, which this MoE block does not use"
    ):
        MoeBlock(more, 0)


def test_norm_topk_prob_is_true_unless_qwen3_leaves_it_out(tmp_path: Path) -> None:
    """transformers' Qwen3MoeConfig takes false then; Qwen3-VL and Qwen3.5 always normalise."""
    MoeBlock(changed(tmp_path / "vl", "qwen3_vl_moe", False, norm_topk_prob=None), 1)
    with pytest.raises(WeightsError, match="norm_topk_prob is False"):
        MoeBlock(changed(tmp_path / "qwen3", "qwen3_moe", False, norm_topk_prob=None), 1)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "gate",
            torch.zeros(4, 40),
            r"mlp.gate.weight is \(4, 40\); config.json makes it \(8, 40\)",
        ),
        (
            "gate",
            torch.zeros(40, 8),
            r"mlp.gate.weight is \(40, 8\); config.json makes it \(8, 40\)",
        ),
        ("gate", None, r"mlp.gate.weight is not there; config.json makes it \(8, 40\)"),
        ("gate", torch.zeros(8, 40).int(), "mlp.gate.weight is stored as torch.int32, which"),
        (
            "gate",
            torch.zeros(8, 40).to(torch.float8_e4m3fn),
            "mlp.gate.weight is stored as torch.float8_e4m3fn, which",
        ),
        ("shared_expert_gate", torch.zeros(40), r"shared_expert_gate.weight is \(40,\)"),
        ("shared_expert.up_proj", None, "shared_expert.up_proj.weight is not there"),
        ("shared_expert.gate_proj", torch.zeros(40, 96), r"gate_proj.weight is \(40, 96\)"),
        ("shared_expert.down_proj", torch.zeros(96, 40), r"down_proj.weight is \(96, 40\)"),
    ],
)
def test_a_matrix_of_the_wrong_shape_or_dtype(
    models: Models, name: str, tensor: Tensor | None, message: str
) -> None:
    stage = models("qwen3_5_moe").stages[0]
    full = f"model.language_model.layers.1.mlp.{name}.weight"
    tensors = {**stage.tensors, full: tensor}
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    MoeBlock(replace(stage, tensors=left), 0)
    with pytest.raises(WeightsError, match=f"^layer 1: .*{message}"):
        MoeBlock(replace(stage, tensors=left), 1)


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(6, 2),
        torch.ones(100, 100),
        torch.ones(1, 1),
        torch.ones(3),
        torch.ones(()),
        torch.ones(6, 3).to(torch.int32),
        torch.ones(6, 3).to(torch.complex64),
    ],
    ids=lambda scale: f"{tuple(scale.shape)} {scale.dtype}",
)
def test_scales_of_a_shared_expert_in_fp8(models: Models, scale: Tensor) -> None:
    """96 x 40 in blocks of 16: 6 x 3 scales, of a dtype that scales have."""
    stage = models("qwen3_5_moe", "fp8").stages[0]
    full = "model.language_model.layers.0.mlp.shared_expert.gate_proj.weight_scale_inv"
    assert stage.tensors[full].shape == (6, 3)
    with pytest.raises(WeightsError, match=r"gate_proj.weight is stored as .* scales of"):
        MoeBlock(replace(stage, tensors={**stage.tensors, full: scale}), 0)


def test_scales_beside_weights_that_need_none(models: Models) -> None:
    stage = models("qwen3_5_moe").stages[0]
    full = "model.language_model.layers.0.mlp.shared_expert.gate_proj.weight_scale_inv"
    with pytest.raises(WeightsError, match=r"gate_proj.weight is stored as torch.bfloat16 with"):
        MoeBlock(replace(stage, tensors={**stage.tensors, full: torch.ones(3, 3)}), 0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("mxfp4", r"weight U8, weight_scale U8 \(quark\)"),
        ("nvfp4", r"input_scale F32, weight U8, .* \(modelopt\)"),
        ("gptq", r"g_idx I32, qweight I32, .* \(gptq\)"),
        ("awq", r"weight_packed I32, .* \(compressed-tensors\)"),
    ],
)
def test_experts_in_another_format(models: Models, weights: str, message: str) -> None:
    stage = models("qwen3_5_moe", weights).stages[0]
    with pytest.raises(
        WeightsError, match=f"^model.*layers.0.mlp.experts: its experts are stored as {message}"
    ):
        MoeBlock(stage, 0)


def test_a_model_without_experts(tmp_path: Path) -> None:
    build(tmp_path / "in", "qwen3_5", layers=2, shards=1)
    split(build_plan(open_checkpoint(tmp_path / "in"), 2), tmp_path / "out", checksums=False)
    with pytest.raises(WeightsError, match="num_experts is None"):
        MoeBlock(load_stage(tmp_path / "out", stage=0, device="cpu"), 0)
