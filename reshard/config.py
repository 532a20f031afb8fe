"""The few facts of a model's config.json that placing its tensors needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import CheckpointError, UnsupportedModelError, quoted

MAX_LAYERS = 100_000


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: how its tensors are named and what it is made of.

    `stem` starts the names of its transformers classes (`Qwen3_5Moe` + `ForConditionalGeneration`).
    `transposed_experts`: the layout of fused experts in released checkpoints, `[E, H, 2I]` instead
    of `[E, 2I, H]` (transformers `Qwen3VLMoeTextExperts`; SGLang and vLLM always transpose for this
    class).
    """

    stem: str
    language_prefix: str
    has_visual: bool
    has_mtp: bool
    transposed_experts: bool = False


def _families() -> dict[str, Family]:
    families = {}
    for name, stem, has_mtp, transposed in (
        ("qwen3_5_moe", "Qwen3_5Moe", True, False),
        ("qwen3_vl_moe", "Qwen3VLMoe", False, True),
        ("qwen3_5", "Qwen3_5", True, False),
        ("qwen3_vl", "Qwen3VL", False, False),
    ):
        families[name] = Family(stem, "model.language_model.", True, has_mtp, transposed)
        families[f"{name}_text"] = Family(stem, "model.", False, has_mtp, transposed)
    families["qwen3_moe"] = Family("Qwen3Moe", "model.", False, False)
    return families


FAMILIES: Mapping[str, Family] = _families()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What reshard reads of config.json. Sizes that a config does not give are None."""

    model_type: str
    family: Family
    num_hidden_layers: int
    num_experts: int | None
    hidden_size: int | None
    moe_intermediate_size: int | None
    tied: bool
    deepstack_levels: int
    quant_method: str | None
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, config: Mapping[str, Any], *, hf_quant_config: bool = False) -> ModelConfig:
        """Read a parsed config.json.

        `hf_quant_config`: the checkpoint has a hf_quant_config.json (modelopt's own file).

        Raises `UnsupportedModelError` for another model_type or architecture, `CheckpointError` for
        a field that is missing or of the wrong kind.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise CheckpointError(
                f"config.json: model_type is {'missing' if model_type is None else 'not text'}",
                hint="give the directory of a Hugging Face checkpoint, with its config.json",
            )
        family = FAMILIES.get(model_type)
        if family is None:
            raise UnsupportedModelError(
                f"model_type {quoted(repr(model_type))} is not supported",
                hint=f"supported model types: {', '.join(FAMILIES)}",
            )
        warnings = _check_architectures(config.get("architectures"), family)
        text = config.get("text_config")
        text = text if isinstance(text, dict) else {}
        layers = _size(config, text, "num_hidden_layers")
        if layers is None:
            raise CheckpointError(
                "config.json: num_hidden_layers is missing "
                "(looked in text_config and at the top level)",
                hint="restore the config.json that came with the checkpoint",
            )
        if not 1 <= layers <= MAX_LAYERS:
            raise CheckpointError(f"config.json: num_hidden_layers {layers} is not a layer count")
        experts = _size(config, text, "num_experts")
        if experts is None:
            experts = _size(config, text, "num_local_experts")
        return cls(
            model_type=model_type,
            family=family,
            num_hidden_layers=layers,
            num_experts=experts or None,
            hidden_size=_size(config, text, "hidden_size"),
            moe_intermediate_size=_size(config, text, "moe_intermediate_size"),
            tied=_tied(config, text),
            deepstack_levels=_deepstack_levels(config),
            quant_method=_quant_method(config, text, hf_quant_config),
            warnings=tuple(warnings),
        )


def _check_architectures(architectures: Any, family: Family) -> list[str]:
    """Another architecture may come under a known model_type; without any, engines stop."""
    if architectures is None or architectures == []:
        return ["config.json has no architectures at its top level; serving engines need it"]
    names = architectures if isinstance(architectures, list) else [architectures]
    known = re.compile(family.stem + "(Text)?(Model|ForCausalLM|ForConditionalGeneration)")
    for name in names:
        if not (isinstance(name, str) and known.fullmatch(name)):
            raise UnsupportedModelError(
                f"architecture {quoted(repr(name))} is not supported",
                hint=f"for this model_type reshard knows {family.stem}ForConditionalGeneration "
                f"and {family.stem}ForCausalLM",
            )
    return []


def _size(config: Mapping[str, Any], text: Mapping[str, Any], field: str) -> int | None:
    """A whole number from text_config or, where that lacks it, from the top level."""
    value = text.get(field)
    if value is None:
        value = config.get(field)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise CheckpointError(f"config.json: {field} is {quoted(repr(value))}, not a whole number")
    return value


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """The top level decides if it says anything, else text_config, else untied."""
    value = config.get("tie_word_embeddings")
    if value is None:
        value = text.get("tie_word_embeddings")
    if not (value is None or isinstance(value, bool)):
        raise CheckpointError(
            f"config.json: tie_word_embeddings is {quoted(repr(value))}, not true or false"
        )
    return bool(value)


def _deepstack_levels(config: Mapping[str, Any]) -> int:
    """How many leading language-model layers receive vision features.

    The indexes themselves number vision blocks; SGLang and vLLM add the features after layers 0 ..
    n-1.
    """
    vision = config.get("vision_config")
    indexes = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return len(indexes) if isinstance(indexes, list) else 0


def _quant_method(
    config: Mapping[str, Any], text: Mapping[str, Any], hf_quant_config: bool
) -> str | None:
    quantization = config.get("quantization_config") or text.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if isinstance(method, str):
        return method
    return "modelopt" if hf_quant_config else None
