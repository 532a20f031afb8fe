"""Which stages hold which component, by engine; and the models that no stages can serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard import ReshardPlan, build_plan, open_checkpoint
from reshard.config import ModelConfig
from reshard.errors import PlanError, UsageError
from reshard.placement import ENGINES, minimum_first_layers, place
from tests.checkpoints import build

EVERYTHING = ("visual", "embed", "head", "mtp")


def config(model_type: str = "qwen3_5_moe", tied: bool = False, levels: int = 0) -> ModelConfig:
    return ModelConfig.from_json(
        {
            "model_type": model_type,
            "num_hidden_layers": 8,
            "tie_word_embeddings": tied,
            "vision_config": {"deepstack_visual_indexes": list(range(levels))},
        }
    )


def holders(
    engine: str, pp_size: int, kinds: tuple[str, ...], replicate: tuple[str, ...] = (), **facts: Any
) -> dict[str, tuple[int, ...]]:
    return dict(place(config(**facts), kinds, engine, pp_size, replicate).stages)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "tied", "mtp", "embed"),
    [
        ("sglang", False, False, (0,)),
        ("sglang", False, True, (0, 3)),
        ("sglang", True, False, (0, 3)),
        ("sglang", True, True, (0, 3)),
        ("vllm", False, False, (0, 1, 2, 3)),
        ("vllm", True, True, (0, 1, 2, 3)),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_5", "qwen3_5_moe_text"])
def test_qwen3_5(
    engine: str, tied: bool, mtp: bool, embed: tuple[int, ...], model_type: str
) -> None:
    visual = not model_type.endswith("_text")
    kinds = ("embed", "head", *(("visual",) if visual else ()), *(("mtp",) if mtp else ()))
    expected = {"visual": (0,), "embed": embed, "head": (3,), "mtp": (3,)}
    assert holders(engine, 4, kinds, model_type=model_type, tied=tied) == {
        kind: stages for kind, stages in expected.items() if kind in kinds
    }


@pytest.mark.parametrize(
    ("engine", "model_type", "embed", "head"),
    [
        ("sglang", "qwen3_vl_moe", (0,), (2,)),
        ("sglang", "qwen3_vl", (0,), (2,)),
        ("vllm", "qwen3_vl_moe", (0, 1, 2), (2, 0, 1)),
        ("vllm", "qwen3_vl", (0, 1, 2), (2,)),
    ],
)
def test_qwen3_vl(
    engine: str, model_type: str, embed: tuple[int, ...], head: tuple[int, ...]
) -> None:
    found = holders(engine, 3, ("visual", "embed", "head"), model_type=model_type)
    assert found == {"visual": (0,), "embed": embed, "head": head}


def test_tied_dense_qwen3_vl() -> None:
    kinds = ("visual", "embed", "head")
    found = holders("sglang", 3, kinds, model_type="qwen3_vl", tied=True)
    assert found == {"visual": (0,), "embed": (0, 2), "head": (2,)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_one_stage_holds_everything_once(engine: str, tied: bool, model_type: str) -> None:
    kinds = EVERYTHING if model_type == "qwen3_5_moe" else EVERYTHING[:3]
    found = holders(engine, 1, kinds, model_type=model_type, tied=tied)
    assert found == dict.fromkeys(kinds, (0,))


def test_the_first_copy_is_at_home() -> None:
    """A component's own stage comes first, so that the others are its replicas."""
    found = holders("sglang", 3, EVERYTHING, replicate=("visual", "head", "embed"))
    assert found == {
        "visual": (0, 1, 2),
        "embed": (0, 1, 2),
        "head": (2, 0, 1),
        "mtp": (2,),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_replicating_on_one_stage_changes_nothing(engine: str) -> None:
    plain = holders(engine, 1, EVERYTHING)
    assert holders(engine, 1, EVERYTHING, replicate=("visual", "embed", "head")) == plain


def test_engines_have_the_versions_that_were_read() -> None:
    assert {name: engine.name for name, engine in ENGINES.items()} == {
        "sglang": "sglang",
        "vllm": "vllm",
    }
    assert all(engine.version for engine in ENGINES.values())


# --- in the files of a plan -----------------------------------------------------------------------


def components(plan: ReshardPlan) -> list[list[str]]:
    """What every stage holds, layers as numbers, replicas in brackets."""
    found = []
    for stage in plan.stages:
        names = []
        for file in stage.files:
            kind, layer = file.component
            name = kind if layer is None else str(layer)
            names.append(f"[{name}]" if kind in stage.replicas else name)
        found.append(names)
    return found


def plan(path: Path, pp_size: int, **options: Any) -> ReshardPlan:
    return build_plan(open_checkpoint(path), pp_size, **options)


def test_a_plan_for_sglang(tmp_path: Path) -> None:
    assert components(plan(build(tmp_path), 3)) == [
        ["visual", "embed", "0", "1"],
        ["2", "3", "4"],
        ["[embed]", "5", "6", "7", "head", "mtp"],
    ]


def test_a_plan_for_vllm(tmp_path: Path) -> None:
    assert components(plan(build(tmp_path), 3, engine="vllm")) == [
        ["visual", "embed", "0", "1", "2"],
        ["[embed]", "3", "4", "5"],
        ["[embed]", "6", "7", "head", "mtp"],
    ]


def test_a_plan_of_qwen3_vl_moe_for_vllm(tmp_path: Path) -> None:
    path = build(tmp_path, "qwen3_vl_moe")
    assert components(plan(path, 2, engine="vllm")) == [
        ["visual", "embed", "0", "1", "2", "3", "[head]"],
        ["[embed]", "4", "5", "6", "7", "head"],
    ]


def test_a_tied_model_has_its_embedding_at_both_ends(tmp_path: Path) -> None:
    path = build(tmp_path, tied=True, mtp=None)
    one, two, four = (components(plan(path, n)) for n in (1, 2, 4))
    assert one == [["visual", "embed", *"01234567", "head"]]
    assert two == [["visual", "embed", *"0123"], ["[embed]", *"4567", "head"]]
    assert [stage for stage in four if "[embed]" in stage] == [["[embed]", "6", "7", "head"]]
    last = plan(path, 4).stages[3]
    assert last.replicas == ("embed",)


def test_a_tied_model_keeps_an_lm_head_that_it_has(tmp_path: Path) -> None:
    """Both tensors go along, but somebody should look at it."""
    path = build(tmp_path, mtp=None)
    config = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    found = plan(path, 2)
    assert components(found) == [["visual", "embed", *"0123"], ["[embed]", *"4567", "head"]]
    head = [file for file in found.stages[1].files if file.component.kind == "head"]
    assert [t.name for file in head for t in file.tensors].count("lm_head.weight") == 1
    assert any("tie" in warning and "lm_head" in warning for warning in found.warnings)


def test_an_untied_model_needs_its_lm_head(tmp_path: Path) -> None:
    path = build(tmp_path, tied=True)
    config = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(PlanError, match="incomplete: no lm_head"):
        plan(path, 2)


def test_a_text_only_model(tmp_path: Path) -> None:
    path = build(tmp_path, text_only=True, mtp=None)
    assert components(plan(path, 2)) == [["embed", *"0123"], [*"4567", "head"]]


def test_without_mtp_the_last_stage_needs_no_embedding(tmp_path: Path) -> None:
    found = plan(build(tmp_path), 2, exclude=["mtp"])
    assert components(found) == [["visual", "embed", *"0123"], [*"4567", "head"]]
    (excluded,) = found.excluded
    assert (excluded.kind, excluded.name, excluded.tensors) == ("component", "mtp", 41)


def test_without_the_vision_tower(tmp_path: Path) -> None:
    found = plan(build(tmp_path), 2, exclude=["visual", "mtp"])
    assert components(found) == [["embed", *"0123"], [*"4567", "head"]]
    assert [excluded.name for excluded in found.excluded] == ["mtp", "visual"]


def test_replicas_of_a_plan(tmp_path: Path) -> None:
    found = plan(build(tmp_path), 2, replicate=["visual", "head"], exclude=["mtp"])
    assert components(found) == [
        ["visual", "embed", *"0123", "[head]"],
        ["[visual]", *"4567", "head"],
    ]
    assert [stage.replicas for stage in found.stages] == [("head",), ("visual",)]


def test_replicas_are_the_same_files(tmp_path: Path) -> None:
    stages = plan(build(tmp_path), 4, engine="vllm", replicate=["visual"]).stages
    for kind in ("visual", "embed"):
        copies = {file for s in stages for file in s.files if file.component.kind == kind}
        assert len(copies) == 1


@pytest.mark.parametrize("weights", ["bf16", "bf16_per_expert", "mixed", "fp8", "nvfp4_fused"])
def test_stages_hold_the_experts_of_their_own_layers(tmp_path: Path, weights: str) -> None:
    """An expert's number is never taken for that of its layer."""
    found = plan(build(tmp_path, weights=weights, experts=12), 4)
    for stage in found.stages:
        prefixes = tuple(f"model.language_model.layers.{n}." for n in stage.layers)
        names = [t.name for f in stage.files for t in f.tensors if f.component.kind == "layer"]
        assert names and all(name.startswith(prefixes) for name in names)


def test_vllms_older_runner_is_mentioned(tmp_path: Path) -> None:
    path = build(tmp_path)
    assert any("--replicate visual" in note for note in plan(path, 2, engine="vllm").notes)
    for options in ({"engine": "sglang"}, {"engine": "vllm", "replicate": ["visual"]}):
        assert not any("--replicate" in note for note in plan(path, 2, **options).notes)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp_size", [2, 4])
def test_tied_qwen3_vl_moe_cannot_be_served_by_sglang(tmp_path: Path, pp_size: int) -> None:
    path = build(tmp_path, "qwen3_vl_moe", tied=True, vision_deepstack_visual_indexes=())
    with pytest.raises(PlanError, match="tied embeddings: SGLang leaves lm_head") as refusal:
        plan(path, pp_size)
    assert refusal.value.hint == "use --engine vllm, or --pp-size 1"
    assert components(plan(path, 1)) == [["visual", "embed", *"01234567", "head"]]
    vllm = components(plan(path, 2, engine="vllm"))
    assert "[embed]" in vllm[1] and "[head]" in vllm[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_vl"])
def test_the_first_stage_must_own_all_deepstack_layers(
    tmp_path: Path, engine: str, family: str
) -> None:
    path = build(tmp_path, family)
    refused: list[dict[str, Any]] = [{}, {"exclude": ["visual"]}, {"layers": (2, 2, 2, 2)}]
    for options in refused:
        with pytest.raises(PlanError, match=r"stage 0 would own 2 layers.*the first 3 layers"):
            plan(path, 4, engine=engine, **options)
    with pytest.raises(PlanError, match="deepstack"):
        plan(path, 2, engine=engine, layers=(2, 6))
    fine: list[dict[str, Any]] = [
        {"layers": (3, 2, 2, 1)},
        {"layers": (3, 1, 1, 3)},
        {"balance": True},
    ]
    for options in fine:
        assert plan(path, 4, engine=engine, **options).partition.counts[0] >= 3
    assert plan(path, 1, engine=engine).partition.counts == (8,)


def test_deepstack_is_counted_in_levels() -> None:
    vl = ModelConfig.from_json(
        {
            "model_type": "qwen3_vl_moe",
            "num_hidden_layers": 8,
            "vision_config": {"deepstack_visual_indexes": [8, 16, 24]},
        }
    )
    assert [minimum_first_layers(vl, n) for n in (1, 2, 8)] == [0, 3, 3]
    assert minimum_first_layers(config(), 4) == 0


def test_balance_cannot_break_the_deepstack_minimum(tmp_path: Path) -> None:
    path = build(tmp_path, "qwen3_vl_moe", layers=4)
    assert plan(path, 2, balance=True).partition.counts == (3, 1)
    with pytest.raises(PlanError, match="4 layers cannot give stage 0 its 3 and 2 others one each"):
        plan(path, 3, balance=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "tensorrt"}, "--engine tensorrt: known engines are sglang, vllm"),
        ({"engine": "SGLang"}, "--engine SGLang: known engines are"),
        ({"exclude": ["head"]}, "--exclude head: can be mtp, visual"),
        ({"exclude": ["layer"]}, "--exclude layer"),
        ({"replicate": ["mtp"]}, "--replicate mtp: can be visual, embed, head"),
        ({"replicate": ["layer"]}, "--replicate layer"),
        ({"replicate": ["visual"], "exclude": ["visual"]}, "--replicate visual"),
        ({"layers": (4, 4), "balance": True}, "--layers and --balance exclude each other"),
        ({"layers": (4, 5)}, "the sum is 9, the model has 8 layers"),
        ({"layers": (8,)}, "1 counts for 2 stages"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        plan(build(tmp_path), 2, **options)
    assert words in refusal.value.message


def test_a_component_that_is_not_there_cannot_be_replicated(tmp_path: Path) -> None:
    path = build(tmp_path, text_only=True, mtp=None)
    with pytest.raises(UsageError, match="--replicate visual: the checkpoint has none"):
        plan(path, 2, replicate=["visual"])


def test_more_stages_than_layers(tmp_path: Path) -> None:
    path = build(tmp_path, layers=2)
    for options in ({}, {"engine": "vllm"}, {"balance": True}):
        with pytest.raises(UsageError, match="the model has only 2 layers"):
            plan(path, 3, **options)
