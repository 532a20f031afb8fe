"""What running a model's experts needs of its config.json, beyond what placing tensors needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.config import ModelConfig
from reshard.errors import WeightsError, quoted


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The sizes of a sparse layer.

    top_k: experts that a token goes to. shared_intermediate_size: width of the shared expert, None
    where the family has none. block: rows and columns of an FP8 weight that share a scale.
    """

    model: ModelConfig
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int | None
    block: tuple[int, int] | None

    @classmethod
    def from_json(cls, config: Mapping[str, Any], model: ModelConfig) -> MoeConfig:
        """Read a parsed config.json, of which `model` is known already.

        Raises `WeightsError` for a model without experts, and for one whose experts are computed in
        another way than these families do (activation, router weights that are not normalised).
        """
        text = config.get("text_config")
        fields = {**config, **(text if isinstance(text, dict) else {})}
        quantization = config.get("quantization_config") or fields.get("quantization_config")

        def number(field: str, value: Any) -> int:
            if type(value) is not int or value < 1:
                raise WeightsError(
                    f"config.json: {field} is {quoted(repr(value))}, and running the experts of "
                    f"{model.model_type} needs it",
                    hint="restore the config.json that came with the checkpoint",
                )
            return value

        if fields.get("hidden_act", "silu") != "silu":
            raise _other_error("hidden_act", fields["hidden_act"], "silu")
        # Qwen3-VL and Qwen3.5 always normalise; transformers drops the field when it saves them.
        normalised = fields.get("norm_topk_prob", model.model_type != "qwen3_moe")
        if normalised is not True:
            raise _other_error("norm_topk_prob", normalised, "true")
        shared = fields.get("shared_expert_intermediate_size")
        return cls(
            model=model,
            num_experts=number("num_experts", model.num_experts),
            top_k=number("num_experts_per_tok", fields.get("num_experts_per_tok")),
            hidden_size=number("hidden_size", model.hidden_size),
            intermediate_size=number("moe_intermediate_size", model.moe_intermediate_size),
            shared_intermediate_size=None
            if shared is None or (type(shared) is int and shared == 0)
            else number("shared_expert_intermediate_size", shared),
            block=fp8_block(quantization),
        )


def fp8_block(quantization: Any) -> tuple[int, int] | None:
    """`weight_block_size` of a quantization_config for FP8 weights; None where it has none."""
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2):
        return None
    rows, columns = block
    if not all(type(n) is int and n > 0 for n in block):
        raise WeightsError(f"config.json: weight_block_size is {quoted(repr(block))}")
    return rows, columns


def _other_error(field: str, found: Any, expected: str) -> WeightsError:
    return WeightsError(
        f"config.json: {field} is {quoted(repr(found))}; the forward computes {expected} only",
        hint="the stage can be loaded, its experts cannot be run here",
    )
