"""The part that a serving process uses: load one stage, run its experts.

    stage = load_stage("OUT/stage-02-of-04", device="cuda")
    block = MoeBlock(stage, layer=31)
    hidden = block(hidden)

docs/runtime.md describes it. Importing it imports torch.
"""

from reshard.runtime.experts import ExpertWeights
from reshard.runtime.fused import fused_experts
from reshard.runtime.loader import load_stage
from reshard.runtime.moe import MoeBlock
from reshard.runtime.weights import StageWeights

__all__ = ["ExpertWeights", "MoeBlock", "StageWeights", "fused_experts", "load_stage"]
