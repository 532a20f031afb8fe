"""The MoE block of a layer: router, routed experts and, in Qwen3.5, the shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reshard.errors import UsageError, WeightsError, quoted
from reshard.runtime.experts import ExpertWeights
from reshard.runtime.fused import Backend, fused_experts, require_backend
from reshard.runtime.fused.reference import dequantised
from reshard.runtime.weights import StageWeights
from reshard.units import counted

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def route(hidden: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: topk_ids `[T, k]` int64, topk_weights float32.

    hidden: `[T, H]`; router: `[E, H]`. Logits in the dtype of `hidden`, softmax in float32, the k largest
    divided by their sum (transformers `Qwen3_5MoeTopKRouter`, `Qwen3VLMoeTextTopKRouter`, which then
    round the weights to the dtype of the model; SGLang and vLLM, and this, keep them in float32).
    """
    logits = F.linear(hidden, router.to(hidden.dtype))
    precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    weights, ids = F.softmax(logits, dim=-1, dtype=precise).topk(top_k, dim=-1)
    return ids, weights / weights.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token goes to, of width Is.

    gate_proj, up_proj: `[Is, H]`; down_proj: `[H, Is]`; output_gate: `[1, H]`, whose sigmoid scales
    what comes out.
    """

    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    output_gate: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: `[T, H]`, and so is what comes out."""

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight.to(x.dtype))

        inner = F.silu(linear(hidden, self.gate_proj)) * linear(hidden, self.up_proj)
        return torch.sigmoid(linear(hidden, self.output_gate)) * linear(inner, self.down_proj)


class MoeBlock:
    """The MoE block of one layer, as transformers' `Qwen3_5MoeSparseMoeBlock` and
    `Qwen3VLMoeTextSparseMoeBlock` compute it.

    Under expert or tensor parallelism it gives this rank's part, and the sum over all ranks is the
    whole; the shared expert counts on the first expert-parallel rank only.
    """

    def __init__(self, stage: StageWeights, layer: int, backend: Backend = "auto") -> None:
        """layer: its number in the whole model.

        Raises `LayerNotHereError`; `WeightsError` for weights that the forward cannot run; `UsageError`.
        """
        require_backend(backend)
        config = stage.moe_config
        if config.top_k > config.num_experts:
            raise WeightsError(
                f"config.json: num_experts_per_tok is {config.top_k}, of {config.num_experts} experts",
                hint="restore the config.json that came with the checkpoint",
            )
        tensors = stage.layer(layer)
        _check_names(tensors, layer, shared=config.shared_intermediate_size is not None)
        self.layer = layer
        self.backend = backend
        self.top_k = config.top_k
        self.experts: ExpertWeights = stage.experts[layer]
        shape = config.num_experts, config.hidden_size
        self.router = _weight(tensors, layer, "mlp.gate", shape, None)
        self.shared_expert: SharedExpert | None = None
        if config.shared_intermediate_size is not None and stage.ep.rank == 0:
            inner = config.shared_intermediate_size // stage.tp.size
            wide, tall = (inner, config.hidden_size), (config.hidden_size, inner)
            block = config.block
            self.shared_expert = SharedExpert(
                gate_proj=_weight(tensors, layer, "mlp.shared_expert.gate_proj", wide, block),
                up_proj=_weight(tensors, layer, "mlp.shared_expert.up_proj", wide, block),
                down_proj=_weight(tensors, layer, "mlp.shared_expert.down_proj", tall, block),
                output_gate=_weight(tensors, layer, "mlp.shared_expert_gate", (1, tall[0]), None),
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: `[..., H]`, after the layer's norm; returns the same shape.

        Raises `UsageError` and `WeightsError` as `fused_experts` does.
        """
        if hidden.shape[-1:] != self.router.shape[1:]:
            raise UsageError(
                f"hidden states of shape {tuple(hidden.shape)} do not end in the hidden size "
                f"{self.router.shape[1]}"
            )
        tokens = hidden.reshape(-1, hidden.shape[-1])
        topk_ids, topk_weights = route(tokens, self.router, self.top_k)
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
    if scale is None and weight.dtype in _FLOATS:
        return weight
    if scale is not None and block is not None and weight.dtype == torch.float8_e4m3fn:
        blocks = tuple(-(-size // n) for size, n in zip(shape, block, strict=True))
        if scale.shape == blocks and scale.dtype in _FLOATS:
            return dequantised(weight.float(), scale, block).to(torch.bfloat16)
    scales = "" if scale is None else f" with {tuple(scale.shape)} scales of {scale.dtype}"
    raise WeightsError(
        f"layer {layer}: {name}.weight is stored as {weight.dtype}{scales}, which the forward cannot "
        "run",
        hint="it takes BF16, F16, F32, F64, and FP8 with scales for the blocks of config.json",
    )


def _check_names(tensors: Mapping[str, Tensor], layer: int, *, shared: bool) -> None:
    """Raise `WeightsError` for tensors that would change what the block computes, if it used them."""
    known = {"mlp.gate.weight"}
    if shared:
        known.add("mlp.shared_expert_gate.weight")
        for proj in ("gate", "up", "down"):
            name = f"mlp.shared_expert.{proj}_proj.weight"
            known |= {name, f"{name}_scale_inv"}
    others = sorted(
        name
        for name in tensors.keys() - known
        if name.startswith("mlp.") and not name.startswith("mlp.experts.")
    )
    if others:
        raise WeightsError(
            f"layer {layer} has {quoted(others[0])}, which this MoE block does not use "
            f"({counted(len(others), 'tensor')} of that kind)",
            hint="config.json and the weights are of different models, or of one that is not known",
        )
