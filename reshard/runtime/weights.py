"""The weights of one stage in memory, by tensor and by layer. Layer numbers are the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reshard.config import ModelConfig
from reshard.errors import LayerNotHereError
from reshard.manifest import Manifest
from reshard.runtime.config import MoeConfig
from reshard.runtime.experts import ExpertWeights
from reshard.runtime.share import Rank
from reshard.units import span


def require_layer(manifest: Manifest, stage: int, layer: int) -> None:
    """Raise `LayerNotHereError`, naming the owner, unless the stage owns the layer."""
    own = manifest.stages[stage]
    if own.start_layer <= layer < own.end_layer:
        return
    here = f"stage {stage} has layers {span(own.start_layer, own.end_layer - 1)}"
    for other in manifest.stages:
        if other.start_layer <= layer < other.end_layer:
            raise LayerNotHereError(
                f"layer {layer} belongs to stage {other.stage} of {manifest.pp_size}; {here}",
                hint="layers keep the numbers that they have in the whole model",
            )
    raise LayerNotHereError(
        f"there is no layer {layer}: the model has {manifest.model.num_hidden_layers}; {here}"
    )


class Experts(Mapping[int, ExpertWeights]):
    """Layer -> its experts, for the sparse layers of a stage. They are views, made when asked for."""

    def __init__(
        self,
        makers: Mapping[int, Callable[[], ExpertWeights]],
        require: Callable[[int], None],
    ) -> None:
        """`require` raises for a layer of another stage."""
        self._makers = makers
        self._require = require
        self._made: dict[int, ExpertWeights] = {}

    def __getitem__(self, layer: int) -> ExpertWeights:
        """Raises `LayerNotHereError`, and `WeightsError` for experts that the forward cannot run."""
        if layer not in self._made:
            if layer not in self._makers:
                self._require(layer)
                raise LayerNotHereError(f"layer {layer} has no routed experts: it is dense")
            self._made[layer] = self._makers[layer]()
        return self._made[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self._makers

    def __iter__(self) -> Iterator[int]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True, slots=True)
class StageWeights:
    """One stage in memory: what this rank holds of it.

    config: the parsed config.json; model: the facts of it that placed the tensors.

    tensors: by their names in the checkpoint. Under expert parallelism (`ep`) without the experts of
    other ranks; of fused experts, those that are here. Under tensor parallelism (`tp`) the parts of
    experts and shared experts that are here. All else is whole.

    experts: layer -> `ExpertWeights`, for the sparse layers of the stage.
    """

    manifest: Manifest = field(repr=False)
    stage: int
    config: Mapping[str, Any] = field(repr=False)
    model: ModelConfig = field(repr=False)
    device: torch.device
    ep: Rank
    tp: Rank
    tensors: Mapping[str, Tensor] = field(repr=False)
    experts: Experts = field(repr=False)

    @property
    def layers(self) -> range:
        """The decoder layers that the stage owns, by their numbers in the whole model."""
        own = self.manifest.stages[self.stage]
        return range(own.start_layer, own.end_layer)

    @property
    def pp_size(self) -> int:
        return self.manifest.pp_size

    @property
    def moe_config(self) -> MoeConfig:
        """Raises `WeightsError` for a model whose experts the forward cannot run."""
        return MoeConfig.from_json(self.config, self.model)

    def layer(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one layer, by what follows `layers.<n>.` in their names.

        Raises `LayerNotHereError`, naming the stage that owns it.
        """
        require_layer(self.manifest, self.stage, layer)
        prefix = f"{self.model.family.language_prefix}layers.{layer}."
        return {
            name[len(prefix) :]: tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }
