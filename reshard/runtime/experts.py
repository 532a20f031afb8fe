"""The routed experts of one layer, as a fused-expert kernel wants them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from reshard.layout import PER_EXPERT, TRANSPOSED
from reshard.runtime.config import MoeConfig
from reshard.runtime.expert_layout import Key, layout_of
from reshard.runtime.share import ExpertModule

_log = logging.getLogger("reshard")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer that this rank holds: E of them, of width I, for hidden size H.

    w13: `[E, 2I, H]`, the I rows of gate, then those of up. w2: `[E, H, I]`. Both are views: their
    strides say how they lie, so transposed checkpoints (`[E, H, 2I]`) have the unit stride in the
    middle.

    FP8 weights have scales, one for each `block` of (rows, columns): w13_scale
    `[E, 2, ceil(I / rows), ceil(H / columns)]`, gate and up apart, for each is rounded up by itself;
    w2_scale `[E, ceil(H / rows), ceil(I / columns)]`. A weight is its stored value times its scale.

    first_expert: the number in the layer of the first one here; num_experts: how many the layer has
    over all expert-parallel ranks.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    block: tuple[int, int] | None
    first_expert: int
    num_experts: int

    @property
    def num_local_experts(self) -> int:
        """E: how many are here."""
        return self.w2.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I: of this rank's part, under tensor parallelism."""
        return self.w2.shape[2]


def expert_weights(
    module: str, stored: ExpertModule, tensors: Mapping[Key, Tensor], config: MoeConfig
) -> ExpertWeights:
    """The experts of a module, as views of the tensors that this rank holds of it.

    tensors: of separate experts, all of one kind together: `[2E, I, H]` for gate and up in turn,
    `[E, H, I]` for down. Raises `WeightsError`; see `expert_layout.layout_of`.
    """
    layout = layout_of(module, stored.groups, config)
    if layout.note:
        _log.warning("%s", layout.note)
    w13, w2 = tensors["gate_up", layout.weight], tensors["down", layout.weight]
    experts = len(stored.here)
    if layout.form == TRANSPOSED:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    elif layout.form == PER_EXPERT:
        w13 = w13.view(experts, 2 * w13.shape[1], w13.shape[2])
    w13_scale = w2_scale = None
    if layout.scale is not None:
        w13_scale, w2_scale = tensors["gate_up", layout.scale], tensors["down", layout.scale]
        w13_scale = w13_scale.view(experts, 2, -1, w13_scale.shape[-1])
    return ExpertWeights(
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        block=config.block if layout.scale is not None else None,
        first_expert=stored.here.start,
        num_experts=stored.num_experts,
    )
