"""What tensor names say, and the traps in them."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import get_layer_id
from reshard.config import FAMILIES, ModelConfig
from reshard.names import (
    Component,
    component_key,
    component_of,
    natural_key,
    parse_expert,
    parse_fused,
)
from tests.checkpoints import RELEASES, inventory

P = "model.language_model."


def config(model_type: str = "qwen3_5_moe", layers: int = 8) -> ModelConfig:
    return ModelConfig.from_json({"model_type": model_type, "num_hidden_layers": layers})


# --- get_layer_id: SGLang's answer, right or wrong ------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (f"{P}layers.59.mlp.experts.gate_up_proj", 59),
        ("model.layers.0.mlp.experts.12.gate_proj.weight", 0),
        ("mtp.layers.0.self_attn.q_proj.weight", 0),
        ("mtp.fc.weight", None),
        ("model.visual.blocks.3.norm1.weight", None),
        ("model.visual.deepstack_merger_list.0.norm.weight", None),
        ("thinker.audio_tower.layers.4.fc1.weight", 4),
        ("layers.0.weight", 0),
        ("xlayers.3.weight", 3),
        ("model.layers.3", None),
        ("model.layers.3x.weight", None),
        ("model.layers.01.weight", 1),
        ("model.layers.-1.weight", None),
        ("model.layers.\u0663.weight", 3),
        ("model.layers.\u00b2.weight", None),
        ("model.layers.4.layers.7.weight", 4),
        ("model.layers.x.layers.7.weight", 7),
        ("", None),
    ],
)
def test_get_layer_id(name: str, layer: int | None) -> None:
    assert get_layer_id(name) == layer


# --- components -----------------------------------------------------------------------------------


def layer(number: int) -> Component:
    return Component("layer", number)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        (f"{P}embed_tokens.weight", Component("embed")),
        (f"{P}embed_tokens.weight_scale", Component("embed")),
        (f"{P}norm.weight", Component("head")),
        ("lm_head.weight", Component("head")),
        ("lm_head.weight_scale_2", Component("head")),
        (f"{P}layers.0.input_layernorm.weight", layer(0)),
        (f"{P}layers.7.linear_attn.A_log", layer(7)),
        (f"{P}layers.7.mlp.experts.gate_up_proj", layer(7)),
        (f"{P}layers.1.mlp.experts.6.down_proj.weight_scale_inv", layer(1)),
        (f"{P}layers.2.self_attn.k_proj.k_scale", layer(2)),
        (f"{P}layers.2.anything.at all", layer(2)),
        (f"{P}layers.2.revisual.weight", layer(2)),
        (f"{P}layers.2.mtp.layers.5.weight", layer(2)),
        ("model.visual.blocks.26.attn.qkv.weight", Component("visual")),
        ("model.visual.deepstack_merger_list.2.norm.weight", Component("visual")),
        ("model.visual.merger.linear_fc1.bias", Component("visual")),
        ("model.visual.layers.3.weight", Component("visual")),
        ("mtp.fc.weight", Component("mtp")),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", Component("mtp")),
        ("mtp.layers.99.weight", Component("mtp")),
    ],
)
def test_known_names(name: str, component: Component) -> None:
    assert component_of(name, config()) == component


@pytest.mark.parametrize(
    "name",
    [
        "",
        "weight",
        # numbers that are no layer of this model
        f"{P}layers.8.input_layernorm.weight",
        f"{P}layers.01.weight",
        f"{P}layers.00.weight",
        f"{P}layers.+1.weight",
        f"{P}layers.-1.weight",
        f"{P}layers.1 .weight",
        f"{P}layers.1_0.weight",
        f"{P}layers.\u0663.weight",
        f"{P}layers.\u00b2.weight",
        f"{P}layers.\uff11.weight",
        f"{P}layers.100000.weight",
        f"{P}layers.{'9' * 5000}.weight",
        f"{P}layers.{'0' * 5000}.weight",
        f"{P}layers..weight",
        f"{P}layers.3",
        f"{P}layers.3x.weight",
        f"{P}layers",
        # other places where layers stand
        f"{P}xlayers.3.weight",
        f"{P}layersx.3.weight",
        f"{P}decoder.layers.3.weight",
        f" {P}layers.3.weight",
        f"x{P}layers.3.weight",
        f"\n{P}layers.3.weight",
        f"{P}\nlayers.3.weight",
        "layers.3.weight",
        "model.layers.3.weight",
        f"{P}language_model.layers.0.weight",
        f"model.{P}layers.0.weight",
        "language_model.layers.0.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.mtp.layers.0.weight",
        f"{P}mtp.layers.0.weight",
        "audio_tower.layers.3.fc1.weight",
        "model.audio_tower.layers.3.fc1.weight",
        "thinker.audio_tower.layers.0.fc1.weight",
        "talker.model.layers.0.weight",
        "vision_tower.encoder.layers.7.weight",
        "eagle.layers.0.weight",
        # words that only look like parts
        "visual.blocks.2.norm1.weight",
        "model.visual",
        "model.visualizer.weight",
        "model.revisual.weight",
        f"{P}visual.blocks.0.weight",
        f"{P}embed_tokens",
        f"{P}embed_tokens_extra.weight",
        f"{P}norm",
        f"{P}norm2.weight",
        f"{P}embed.norm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head",
        "lm_heads.weight",
        "model.lm_head.weight",
        f"{P}lm_head.weight",
        "LM_HEAD.weight",
        "mtp",
        "mtpx.fc.weight",
        "xmtp.fc.weight",
        # parts of a related family that is not supported
        f"{P}ngram_embedding.shard_0.weight",
        "model.x_embedder.proj.weight",
        "model.hyper_connection_mixer.weight",
    ],
)
def test_unknown_names_have_no_component(name: str) -> None:
    assert component_of(name, config()) is None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_prefixes_of_every_family(model_type: str) -> None:
    text = model_type.endswith("_text") or model_type == "qwen3_moe"
    mtp = model_type.startswith("qwen3_5")
    here, there = ("model.", P) if text else (P, "model.")
    facts = config(model_type)

    assert component_of(f"{here}layers.3.mlp.gate.weight", facts) == layer(3)
    assert component_of(f"{here}embed_tokens.weight", facts) == Component("embed")
    assert component_of(f"{here}norm.weight", facts) == Component("head")
    assert component_of("lm_head.weight", facts) == Component("head")
    assert component_of(f"{there}layers.3.mlp.gate.weight", facts) is None
    assert component_of(f"{there}norm.weight", facts) is None
    visual = component_of("model.visual.blocks.0.norm1.weight", facts)
    assert visual == (None if text else Component("visual"))
    assert component_of("mtp.fc.weight", facts) == (Component("mtp") if mtp else None)


@pytest.mark.parametrize("layers", [1, 10, 11, 60, 100_000])
def test_layer_numbers_end_at_the_layer_count(layers: int) -> None:
    facts = config(layers=layers)
    assert component_of(f"{P}layers.{layers - 1}.x", facts) == layer(layers - 1)
    assert component_of(f"{P}layers.{layers}.x", facts) is None


@given(st.text(), st.sampled_from(sorted(FAMILIES)))
def test_a_layer_is_only_what_both_readings_call_one(rest: str, model_type: str) -> None:
    """Whatever follows the prefix, no number is made up, and no hostile one is converted."""
    facts = config(model_type)
    prefix = facts.family.language_prefix
    found = component_of(f"{prefix}layers.{rest}", facts)
    plain = re.match(r"([0-7])\.", rest)
    assert found == (layer(int(plain[1])) if plain else None)
    if found:
        assert get_layer_id(f"{prefix}layers.{rest}") == found.layer_id


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_of_the_releases_has_a_component(release: str) -> None:
    dims = RELEASES[release].dims
    facts = config(RELEASES[release].family, dims.num_hidden_layers)
    found = [component_of(name, facts) for name in inventory(release)]
    expected = {layer(n) for n in range(dims.num_hidden_layers)}
    expected |= {Component("embed"), Component("head"), Component("visual")}
    expected |= {Component("mtp")} if RELEASES[release].mtp else set()
    assert set(found) == expected


def test_file_stems_and_document_keys() -> None:
    assert layer(12).stem == "model-layer-00012"
    assert layer(0).stem == "model-layer-00000"
    assert Component("visual").stem == "model-visual"
    assert component_key(layer(3)) == "layers"
    assert component_key(Component("mtp")) == "mtp"


# --- natural order --------------------------------------------------------------------------------


def test_numbers_sort_by_value() -> None:
    names = [
        "",
        "1",
        "2",
        "10",
        "a",
        "layers.1.b",
        "layers.2.a",
        "layers.10.a",
        "layers.99999999999999999999.a",
        "layers.100000000000000000000.a",
        "layers.\u0663.a",
        "\u00e9",
        "\U0001f600",
    ]
    shuffled = Random(0).sample(names, len(names))
    assert sorted(shuffled, key=natural_key) == names


def test_leading_zeros_decide_last() -> None:
    assert sorted(["a1b", "a01", "a1", "a001b"], key=natural_key) == ["a01", "a1", "a001b", "a1b"]


def test_numbers_are_never_converted() -> None:
    longest = "layers." + "9" * 5000 + ".x"
    assert natural_key("layers.5.x") < natural_key(longest) < natural_key(longest + "0")


def order(name: str) -> tuple[object, ...]:
    """The same order, from small numbers that Python may convert."""
    pieces: list[object] = list(re.split("([0-9]+)", name))
    pieces[1::2] = [int(str(digits)) for digits in pieces[1::2]]
    return (pieces, name.encode("utf-8"))


NAMES = st.text(st.sampled_from("ab.019\u0663\u00e9"), max_size=8)


@given(NAMES, NAMES)
def test_natural_order_is_by_text_number_and_bytes(first: str, second: str) -> None:
    assert (natural_key(first) < natural_key(second)) == (order(first) < order(second))
    assert (natural_key(first) == natural_key(second)) == (first == second)


# --- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("proj", ["gate", "up", "down"])
@pytest.mark.parametrize("suffix", ["weight", "weight_scale_inv", "qweight", "a.b", "w\nx"])
def test_expert_names(proj: str, suffix: str) -> None:
    module = f"{P}layers.3.mlp.experts"
    name = f"{module}.17.{proj}_proj.{suffix}"
    assert parse_expert(name) == (module, 17, proj, suffix)
    assert parse_fused(name) is None


@pytest.mark.parametrize(
    "rest",
    [
        "gate_up_proj",
        "0.gate_up_proj.weight",
        "0.gate_proj",
        "0.gate_proj.",
        "0.gate_projx.weight",
        "01.gate_proj.weight",
        "\u0663.gate_proj.weight",
        "-1.gate_proj.weight",
        "123456.gate_proj.weight",
        f"{'9' * 5000}.gate_proj.weight",
        "0.w1.weight",
        "0.mlp.gate_proj.weight",
    ],
)
def test_other_names_are_no_single_expert(rest: str) -> None:
    assert parse_expert(f"{P}layers.3.mlp.experts.{rest}") is None


def test_names_without_experts_are_neither() -> None:
    for name in ("experts.0.gate_proj.weight", "m.shared_expert.gate_proj.weight", ""):
        assert parse_expert(name) is None and parse_fused(name) is None


@pytest.mark.parametrize("suffix", ["", "_scale", "_scale_2", ".input_scale"])
def test_fused_names(suffix: str) -> None:
    module = f"{P}layers.3.mlp.experts"
    assert parse_fused(f"{module}.gate_up_proj{suffix}") == (module, "gate_up", suffix)
    assert parse_fused(f"{module}.down_proj{suffix}") == (module, "down", suffix)
    assert parse_expert(f"{module}.down_proj{suffix}") is None
