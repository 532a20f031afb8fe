"""Load one stage of a set of bundles, and look at what this rank holds.

python examples/load_stage.py OUT/stage-01-of-02
python examples/load_stage.py org/name 1 --ep 0/4
"""

from __future__ import annotations

import argparse

from reshard import ReshardError
from reshard.runtime import load_stage


def rank(text: str) -> tuple[int, int]:
    """`1/4` -> (1, 4)"""
    number, size = text.split("/")
    return int(number), int(size)


parser = argparse.ArgumentParser(description="Load one stage.")
parser.add_argument("set", help="stage directory, root of a set, or org/name on the Hub")
parser.add_argument("stage", type=int, nargs="?", help="which one, where there are several")
parser.add_argument("--device", help="cuda:N or cpu; default: CUDA, if it is there")
parser.add_argument("--ep", type=rank, default=(0, 1), help="rank/size of expert parallelism")
parser.add_argument("--tp", type=rank, default=(0, 1), help="rank/size of tensor parallelism")
given = parser.parse_args()

try:
    stage = load_stage(given.set, stage=given.stage, device=given.device, ep=given.ep, tp=given.tp)
except ReshardError as error:
    parser.exit(1, f"error: {error}\n")

nbytes = sum(tensor.nbytes for tensor in stage.tensors.values())
print(f"stage {stage.stage} of {stage.pp_size} on {stage.device}: {len(stage.tensors)} tensors,")
print(f"{nbytes:,} bytes, layers {stage.layers[0]} to {stage.layers[-1]}")
for layer, experts in stage.experts.items():
    w13, w2 = tuple(experts.w13.shape), tuple(experts.w2.shape)
    print(f"layer {layer}: w13 {w13} w2 {w2} {experts.w13.dtype}")
