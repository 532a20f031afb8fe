"""Which stages need which component, by serving engine.

docs/placement.md explains the table and where in the engines it comes from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from reshard.config import ModelConfig
from reshard.errors import PlanError, UsageError, quoted


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine, and the version whose source the placement was read from."""

    name: str
    version: str


ENGINES: Mapping[str, Engine] = {
    "sglang": Engine("sglang", "0.5.23"),
    "vllm": Engine("vllm", "0.33.0"),
}

EXCLUDABLE = ("mtp", "visual")
REPLICABLE = ("visual", "embed", "head")


@dataclass(frozen=True, slots=True)
class Placement:
    """Component kind -> the stages that hold it, its home first. Layers are not in here."""

    engine: Engine
    stages: Mapping[str, tuple[int, ...]]

    def kinds_on(self, stage: int) -> list[str]:
        return [kind for kind, stages in self.stages.items() if stage in stages]


def place(
    config: ModelConfig,
    kinds: Collection[str],
    engine_name: str,
    pp_size: int,
    replicate: Collection[str] = (),
) -> Placement:
    """Where the components `kinds` of a model go.

    Raises `UsageError` for an unknown engine or component, `PlanError` for a model that the engine
    cannot run in that many stages.
    """
    engine = ENGINES.get(engine_name)
    if engine is None:
        raise UsageError(f"--engine {quoted(engine_name)}: known engines are {', '.join(ENGINES)}")
    for kind in replicate:
        if kind not in REPLICABLE:
            raise UsageError(f"--replicate {quoted(kind)}: can be {', '.join(REPLICABLE)}")
        if kind not in kinds:
            raise UsageError(f"--replicate {kind}: the checkpoint has none, or it is excluded")
    vl_moe = config.model_type.startswith("qwen3_vl_moe")
    if vl_moe and config.tied and engine.name == "sglang" and pp_size > 1:
        raise PlanError(
            "tied embeddings: SGLang leaves lm_head of a Qwen3-VL MoE model uninitialised on the last "
            "of several stages",
            hint="use --engine vllm, or --pp-size 1",
        )
    every = tuple(range(pp_size))
    first, last = every[:1], every[-1:]
    stages = {"visual": first, "embed": first, "head": last, "mtp": last}
    if engine.name == "vllm":
        stages["embed"] = every
        if vl_moe:
            stages["head"] = last + every[:-1]
    elif (config.tied or "mtp" in kinds) and pp_size > 1:
        stages["embed"] = first + last
    for kind in replicate:
        home = stages[kind][0]
        stages[kind] = (home, *(stage for stage in every if stage != home))
    return Placement(engine, {kind: s for kind, s in stages.items() if kind in kinds})


def minimum_first_layers(config: ModelConfig, pp_size: int) -> int:
    """How many layers stage 0 must own: all that receive deepstack vision features.

    Engines do not send these features between stages; vLLM asserts it, SGLang answers wrongly on
    images without an error.
    """
    return config.deepstack_levels if pp_size > 1 else 0
