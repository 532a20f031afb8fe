"""Reshard Qwen3.5 / Qwen3-VL MoE checkpoints into per-pipeline-stage bundles, byte for byte.

    checkpoint = open_checkpoint("Qwen3.5-35B-A3B")
    plan = build_plan(checkpoint, pp_size=4, engine="sglang")
    split(plan, "Qwen3.5-35B-A3B-pp4")

docs/api.md describes every function. Nothing here imports torch.
"""

from reshard.bundle import BundleSet
from reshard.checkpoint import Checkpoint, open_checkpoint
from reshard.errors import ReshardError
from reshard.inspect import inspect
from reshard.merge import merge
from reshard.names import get_layer_id
from reshard.plan import ReshardPlan, build_plan
from reshard.pull import pull
from reshard.push import push
from reshard.split import split
from reshard.verify import verify
from reshard.version import __version__

__all__ = [
    "BundleSet",
    "Checkpoint",
    "ReshardError",
    "ReshardPlan",
    "__version__",
    "build_plan",
    "get_layer_id",
    "inspect",
    "merge",
    "open_checkpoint",
    "pull",
    "push",
    "split",
    "verify",
]
