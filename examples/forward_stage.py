"""Run the MoE blocks of one stage on random hidden states, layer after layer.

    python examples/forward_stage.py OUT/stage-01-of-02 --tokens 16

It is no model: attention is left out, and a plain norm stands between the blocks.
"""

from __future__ import annotations

import argparse

import torch

from reshard import ReshardError
from reshard.runtime import MoeBlock, load_stage

parser = argparse.ArgumentParser(description="Run a stage's MoE blocks.")
parser.add_argument("stage_dir")
parser.add_argument("--tokens", type=int, default=16)
given = parser.parse_args()

try:
    stage = load_stage(given.stage_dir)  # on CUDA, or on the CPU where there is none
    blocks = {layer: MoeBlock(stage, layer) for layer in stage.experts}
    size = stage.moe_config.hidden_size
except ReshardError as error:
    parser.exit(1, f"error: {error}\n")

torch.manual_seed(0)
hidden = torch.randn(given.tokens, size, device=stage.device).to(torch.bfloat16)
for layer, block in blocks.items():
    with torch.inference_mode():
        out = block(hidden)
    print(
        f"layer {layer}: {tuple(out.shape)} {out.dtype}, rms {out.float().square().mean().sqrt():.4f}"
    )
    hidden = torch.nn.functional.rms_norm(hidden + out, (size,))
