"""The MoE block of a layer: router, routed experts and, in Qwen3.5, the shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reshard.errors import UsageError, WeightsError
from reshard.runtime.experts import ExpertWeights
from reshard.runtime.fused import Backend, fused_experts
from reshard.runtime.fused.reference import in_blocks
from reshard.runtime.weights import StageWeights


def route(hidden: Tensor, gate: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: topk_ids `[T, k]` int64, topk_weights float32.

    hidden: `[T, H]`; gate: `[E, H]`. Logits in the dtype of `hidden`, softmax in float32, the k largest
    divided by their sum (transformers `Qwen3_5MoeTopKRouter`, `Qwen3VLMoeTextTopKRouter`, which then
    round the weights to the dtype of the model; SGLang and vLLM, and this, keep them in float32).
    """
    logits = F.linear(hidden, gate.to(hidden.dtype))
    precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    weights, ids = F.softmax(logits, dim=-1, dtype=precise).topk(top_k, dim=-1)
    return ids, weights / weights.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token goes to: down `[H, Is]` of silu(gate `[Is, H]`) * up `[Is, H]`.

    router: `[1, H]`; its sigmoid scales what comes out.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    router: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: `[T, H]`, and so is what comes out."""
        gate, up, down, router = (
            weight.to(hidden.dtype) for weight in (self.gate, self.up, self.down, self.router)
        )
        inner = F.silu(F.linear(hidden, gate)) * F.linear(hidden, up)
        return torch.sigmoid(F.linear(hidden, router)) * F.linear(inner, down)


class MoeBlock:
    """The MoE block of one layer, as transformers' `Qwen3_5MoeSparseMoeBlock` and
    `Qwen3VLMoeTextSparseMoeBlock` compute it.

    Under expert or tensor parallelism it gives this rank's part, and the sum over all ranks is the
    whole; the shared expert counts on the first expert-parallel rank only.
    """

    def __init__(self, stage: StageWeights, layer: int, backend: Backend = "auto") -> None:
        """layer: its number in the whole model.

        Raises `LayerNotHereError`, and `WeightsError` for weights that the forward cannot run.
        """
        config = stage.moe_config
        if config.top_k > config.num_experts:
            raise WeightsError(
                f"config.json: num_experts_per_tok is {config.top_k}, of {config.num_experts} experts",
                hint="restore the config.json that came with the checkpoint",
            )
        tensors = stage.layer(layer)
        self.layer = layer
        self.backend = backend
        self.top_k = config.top_k
        self.experts: ExpertWeights = stage.experts[layer]
        shape = config.num_experts, config.hidden_size
        self.gate = _weight(tensors, layer, "mlp.gate", shape, None)
        self.shared_expert: SharedExpert | None = None
        if config.shared_intermediate_size is not None and stage.ep.rank == 0:
            inner = config.shared_intermediate_size // stage.tp.size
            wide, tall = (inner, config.hidden_size), (config.hidden_size, inner)
            block = config.block
            self.shared_expert = SharedExpert(
                gate=_weight(tensors, layer, "mlp.shared_expert.gate_proj", wide, block),
                up=_weight(tensors, layer, "mlp.shared_expert.up_proj", wide, block),
                down=_weight(tensors, layer, "mlp.shared_expert.down_proj", tall, block),
                router=_weight(tensors, layer, "mlp.shared_expert_gate", (1, tall[0]), None),
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: `[..., H]`, after the layer's norm; returns the same shape.

        Raises `UsageError` and `WeightsError` as `fused_experts` does.
        """
        if hidden.shape[-1:] != self.gate.shape[1:]:
            raise UsageError(
                f"hidden states of shape {tuple(hidden.shape)} do not end in the hidden size "
                f"{self.gate.shape[1]}"
            )
        tokens = hidden.reshape(-1, hidden.shape[-1])
        topk_ids, topk_weights = route(tokens, self.gate, self.top_k)
        out = fused_experts(tokens, self.experts, topk_ids, topk_weights, self.backend)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        return out.view(hidden.shape)


def _weight(
    tensors: Mapping[str, Tensor],
    layer: int,
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
) -> Tensor:
    """The weight of a small matrix; of one in FP8, the product with its scales, in bfloat16."""
    weight, scale = tensors.get(f"{name}.weight"), tensors.get(f"{name}.weight_scale_inv")
    if weight is None or weight.shape != shape:
        found = "is not there" if weight is None else f"is {tuple(weight.shape)}"
        raise WeightsError(
            f"layer {layer}: {name}.weight {found}; config.json makes it {shape}",
            hint="the weights and config.json are of different models, or stored in another format",
        )
    if weight.dtype == torch.float8_e4m3fn and scale is not None and block is not None:
        return in_blocks(weight.float(), scale, block).to(torch.bfloat16)
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise WeightsError(
            f"layer {layer}: {name}.weight is stored as {weight.dtype}, which the forward cannot run"
        )
    return weight
