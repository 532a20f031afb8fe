"""The commands that start a serving engine on a set, node by node."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from reshard.errors import UsageError
from reshard.manifest import Manifest
from reshard.units import span

_LARGE_FILE = 4_000_000_000
"""Layer files above this size fill host memory when SGLang loads ten of them at once."""


class NodeCommands(NamedTuple):
    """What to run on one node: fetch its stages, then start the engine."""

    node: int
    stages: list[int]
    pull: str
    launch: str


def share_stages(pp_size: int, nodes: int | None) -> list[range]:
    """The stages of each of `nodes` nodes (default: one for each stage), consecutive ones.

    Raises `UsageError` where the stages cannot be shared out evenly.
    """
    nodes = pp_size if nodes is None else nodes
    if nodes < 1 or pp_size % nodes:
        raise UsageError(f"--nodes {nodes}: {pp_size} stages cannot be shared out evenly")
    each = pp_size // nodes
    return [range(node * each, (node + 1) * each) for node in range(nodes)]


def node_commands(manifest: Manifest, where: str, nodes: int | None = None) -> list[NodeCommands]:
    """What to run on each node whose stages are all present. `where`: what to pull them from.

    Engines want the same model path on every node, so every node pulls its stages to that path.
    """
    shares = share_stages(manifest.pp_size, nodes)
    name = manifest.source.directory or (manifest.source.repo or "").rpartition("/")[2]
    model_path = "/models/" + re.sub(r"[^\w.-]", "_", name)
    commands = []
    for node, stages in enumerate(shares):
        if not set(stages) <= set(manifest.present):
            continue
        wanted = span(stages[0], stages[-1])
        pull = ["reshard", "pull", where, model_path, "--stage", wanted]
        launch = _launch(manifest, model_path, node, len(shares))
        commands.append(NodeCommands(node, list(stages), shlex.join(pull), launch))
    return commands


def _launch(manifest: Manifest, model_path: str, node: int, nodes: int) -> str:
    counts = ",".join(map(str, manifest.partition.layers))
    pp_size = str(manifest.pp_size)
    if manifest.engine.name == "vllm":
        words = ["vllm", "serve", model_path, "--pipeline-parallel-size", pp_size]
        if nodes > 1:
            words += ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "HEAD"]
            words += ["--headless"] if node else []
        variable = "VLLM_PP_LAYER_PARTITION"
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", model_path]
        words += ["--pp-size", pp_size]
        if nodes > 1:
            words += ["--nnodes", str(nodes), "--node-rank", str(node)]
            words += ["--dist-init-addr", "HEAD:20000"]
        if any(file.bytes > _LARGE_FILE for file in manifest.files(present_only=False).values()):
            config = '{"enable_multithread_load": true, "num_threads": 2}'
            words += ["--model-loader-extra-config", config]
        variable = "SGLANG_PP_LAYER_PARTITION"
    prefix = f"{variable}={counts} " if manifest.pp_size > 1 else ""
    return prefix + shlex.join(words)
