"""The facts that reshard takes from config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard import open_checkpoint
from reshard.config import FAMILIES, ModelConfig
from reshard.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import RELEASES, build
from tests.checkpoints import config as released_config

NESTED: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 8,
        "num_experts": 4,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
    },
}


def read(**changes: Any) -> ModelConfig:
    """The facts of `NESTED` with other fields at its top level; None takes a field out."""
    config = {k: v for k, v in {**NESTED, **changes}.items() if v is not None}
    return ModelConfig.from_json(config)


def text(**changes: Any) -> dict[str, Any]:
    """The `text_config` of `NESTED` with other fields; None takes a field out."""
    nested = {**NESTED["text_config"], **changes}
    return {k: v for k, v in nested.items() if v is not None}


# --- where fields stand ---------------------------------------------------------------------------


def test_nested_fields() -> None:
    facts = read()
    assert facts.model_type == "qwen3_5_moe"
    assert facts.num_hidden_layers == 8
    assert facts.num_experts == 4
    assert (facts.hidden_size, facts.moe_intermediate_size) == (32, 24)
    assert facts.tied is False
    assert facts.deepstack_levels == 0
    assert facts.quant_method is None
    assert facts.warnings == ()


def test_flat_fields() -> None:
    facts = read(text_config=None, num_hidden_layers=5, num_experts=2, hidden_size=16)
    assert (facts.num_hidden_layers, facts.num_experts, facts.hidden_size) == (5, 2, 16)
    assert facts.moe_intermediate_size is None


def test_the_text_model_is_asked_before_the_top_level() -> None:
    facts = read(num_hidden_layers=99, num_experts=99, hidden_size=99)
    assert (facts.num_hidden_layers, facts.num_experts, facts.hidden_size) == (8, 4, 32)


def test_the_vision_tower_is_never_asked() -> None:
    vision = {"num_hidden_layers": 27, "hidden_size": 1152, "num_experts": 3, "depth": 27}
    with pytest.raises(CheckpointError, match="num_hidden_layers is missing"):
        read(text_config={}, vision_config=vision)
    assert read(text_config={"num_hidden_layers": 8}, vision_config=vision).hidden_size is None


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({"num_experts": 4}, 4),
        ({"num_local_experts": 6}, 6),
        ({"num_experts": 4, "num_local_experts": 6}, 4),
        ({"num_experts": 0}, None),
        ({}, None),
    ],
)
def test_expert_count(fields: dict[str, int], experts: int | None) -> None:
    assert read(text_config={"num_hidden_layers": 8, **fields}).num_experts == experts


def test_expert_count_under_its_other_name_at_the_top_level() -> None:
    assert read(text_config=None, num_hidden_layers=8, num_local_experts=6).num_experts == 6


@pytest.mark.parametrize(
    ("root", "nested", "tied"),
    [
        (None, None, False),
        (True, None, True),
        (False, None, False),
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
        (True, True, True),
    ],
)
def test_tied_is_decided_by_the_top_level_first(
    root: bool | None, nested: bool | None, tied: bool
) -> None:
    facts = read(tie_word_embeddings=root, text_config=text(tie_word_embeddings=nested))
    assert facts.tied is tied


@pytest.mark.parametrize(
    ("vision", "levels"),
    [
        (None, 0),
        ({}, 0),
        ({"deepstack_visual_indexes": []}, 0),
        ({"deepstack_visual_indexes": None}, 0),
        ({"deepstack_visual_indexes": [8, 16, 24]}, 3),
        ({"deepstack_visual_indexes": [0]}, 1),
    ],
)
def test_deepstack_counts_levels_not_block_numbers(
    vision: dict[str, Any] | None, levels: int
) -> None:
    assert read(vision_config=vision).deepstack_levels == levels


@pytest.mark.parametrize(
    ("root", "nested", "file", "method"),
    [
        (None, None, False, None),
        (None, None, True, "modelopt"),
        ({"quant_method": "fp8"}, None, False, "fp8"),
        ({"quant_method": "fp8"}, None, True, "fp8"),
        (None, {"quant_method": "awq"}, False, "awq"),
        ({"quant_method": "fp8"}, {"quant_method": "awq"}, False, "fp8"),
        ({"bits": 4}, None, False, None),
        ({"quant_method": 7}, None, False, None),
    ],
)
def test_quant_method(
    root: dict[str, Any] | None, nested: dict[str, Any] | None, file: bool, method: str | None
) -> None:
    config = {**NESTED, "text_config": text(quantization_config=nested)}
    if root is not None:
        config["quantization_config"] = root
    assert ModelConfig.from_json(config, hf_quant_config=file).quant_method == method


def test_quant_method_of_a_checkpoint_that_has_modelopts_own_file_only(tmp_path: Path) -> None:
    path = build(tmp_path, weights="nvfp4")
    config = json.loads((path / "config.json").read_bytes())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).config.quant_method == "modelopt"
    (path / "hf_quant_config.json").unlink()
    assert open_checkpoint(path).config.quant_method is None


# --- which models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_takes_its_own_architectures(model_type: str) -> None:
    stem = FAMILIES[model_type].stem
    for ending in ("ForConditionalGeneration", "ForCausalLM", "Model", "TextModel"):
        assert read(model_type=model_type, architectures=[stem + ending]).warnings == ()


@pytest.mark.parametrize("release", RELEASES)
def test_released_configs(release: str) -> None:
    model = RELEASES[release]
    facts = ModelConfig.from_json(released_config(release))
    assert facts.model_type == model.family
    assert facts.num_hidden_layers == model.dims.num_hidden_layers
    assert facts.num_experts == model.dims.num_experts
    assert facts.tied is False
    assert facts.deepstack_levels == len(model.dims.vision_deepstack_visual_indexes)
    assert facts.warnings == ()


@pytest.mark.parametrize(
    "model_type",
    ["qwen4_exp", "qwen3_omni_moe", "qwen2_moe", "llama", "", "QWEN3_5_MOE", "qwen3_5_moe_vision"],
)
def test_other_model_types_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        read(model_type=model_type)
    assert f"model_type '{model_type}' is not supported" in refusal.value.message
    assert refusal.value.hint is not None and "qwen3_5_moe_text" in refusal.value.hint


@pytest.mark.parametrize(
    "architectures",
    [
        ["Qwen4ExpForConditionalGeneration"],
        ["Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration"],
        "Qwen4ExpForConditionalGeneration",
        ["Qwen3VLMoeForConditionalGeneration"],
        ["Qwen3_5ForConditionalGeneration"],
        ["Qwen3_5MoeForConditionalGenerationX"],
        ["XQwen3_5MoeForConditionalGeneration"],
        ["Qwen3_5MoeForConditionalGeneration\n"],
        [None],
        [7],
        {"name": "Qwen3_5MoeForConditionalGeneration"},
    ],
)
def test_another_architecture_under_a_known_model_type_is_refused(architectures: object) -> None:
    with pytest.raises(UnsupportedModelError, match="is not supported") as refusal:
        read(architectures=architectures)
    assert refusal.value.hint is not None
    assert "Qwen3_5MoeForConditionalGeneration" in refusal.value.hint


@pytest.mark.parametrize("architectures", [None, []])
def test_missing_architectures_are_a_warning(architectures: list[str] | None) -> None:
    (warning,) = read(architectures=architectures).warnings
    assert "no architectures" in warning


def test_architectures_inside_text_config_do_not_help_engines() -> None:
    nested = text(architectures=["Qwen3_5MoeForCausalLM"])
    assert read(architectures=None, text_config=nested).warnings


# --- missing and malformed fields -----------------------------------------------------------------


def test_missing_model_type() -> None:
    with pytest.raises(CheckpointError, match="config.json: model_type is missing"):
        read(model_type=None)
    with pytest.raises(CheckpointError, match="config.json: model_type is not text"):
        read(model_type=["qwen3_5_moe"])


@pytest.mark.parametrize("text_config", [{}, None, "qwen"])
def test_missing_layer_count_says_where_it_was_looked_for(text_config: object) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(text_config=text_config)
    message = refusal.value.message
    assert "num_hidden_layers is missing" in message
    assert "text_config" in message and "top level" in message


@pytest.mark.parametrize("layers", [0, 100_001, 10**30])
def test_absurd_layer_counts(layers: int) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        read(text_config=text(num_hidden_layers=layers))


@pytest.mark.parametrize("value", [-1, 8.0, "8", True, [8], {}])
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_experts", "hidden_size"])
def test_sizes_must_be_whole_numbers(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {field} is .*, not a whole number"):
        read(text_config=text(**{field: value}))


def test_a_checkpoint_without_config(tmp_path: Path) -> None:
    (build(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match="there is no config.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "config.json is not valid JSON"),
        (b'{"model_type": ', r"config.json is not valid JSON.*line 1, column"),
        (b"[]", "config.json must be an object"),
        (b'{"model_type": "qwen3_5_moe", "model_type": "llama"}', "duplicate key model_type"),
        (b'{"model_type": "\xff"}', "config.json is not valid UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "config.json is not valid JSON"),
    ],
    ids=["empty", "cut", "list", "duplicate", "not-utf-8", "deep", "digits"],
)
def test_a_config_that_is_no_json_object(tmp_path: Path, content: bytes, words: str) -> None:
    (build(tmp_path) / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", ["false", 1.5, [], {}])
def test_tied_must_be_a_truth_value(value: object) -> None:
    with pytest.raises(CheckpointError, match="tie_word_embeddings is .*, not true or false"):
        read(tie_word_embeddings=value)


def test_null_in_text_config_lets_the_top_level_answer() -> None:
    nested = {**NESTED["text_config"], "num_hidden_layers": None}
    assert read(text_config=nested, num_hidden_layers=6).num_hidden_layers == 6


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    """It would otherwise reach the manifest, which could not be written."""
    source = build(tmp_path / "source")
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "\ud800"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lone surrogate"):
        open_checkpoint(source)
