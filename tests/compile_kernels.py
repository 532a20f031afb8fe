"""Compile every kernel for every GPU class, without a GPU, and look at what came out.

    python tests/compile_kernels.py [--jobs 2]

Every tile of `reshard/runtime/fused/tiles.py`, with the arguments that the released models bring, for
compute capability 8.0, 8.9, 9.0 and 10.0: registers are not spilled, shared memory is within the
limit of the GPU (which a compiler does not check, but a launch does), and products use matrix
instructions. Needs triton alone; prints a JSON line for each kernel and exits with 1 if any is bad.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FUSED = ROOT / "reshard" / "runtime" / "fused"

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a program may use, by compute capability."""

MATRIX = {
    # what a product of this kind must contain: capability -> pattern of instructions
    "16-bit": {80: r"\bHMMA", 89: r"\bHMMA", 90: r"\bHGMMA", 100: r"\bUTCHMMA"},
    "fp8": {89: r"\bQMMA", 90: r"\bQGMMA", 100: r"\bUTCQMMA"},
}
SMALL_MATRIX = {"16-bit": r"\bHMMA", "fp8": r"\b[QH]MMA"}
"""With fewer than 64 rows, the instructions of warp groups (9.0) and of clusters (10.0) do not fit."""


@dataclass(frozen=True)
class Model:
    """The sizes that a launch depends on."""

    name: str
    hidden_size: int
    inner_size: int
    top_k: int
    transposed: bool = False


MODELS = (
    Model("35B", 2048, 512, 8),
    Model("397B", 4096, 1024, 10),
    Model("235B", 4096, 1536, 8, transposed=True),
)


@dataclass(frozen=True)
class Case:
    """One compilation. signature: argument -> type; constants; divisible: arguments that are
    multiples of 16, as a launch finds them."""

    kernel: str
    kind: str
    capability: int
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: frozenset[str]
    num_warps: int
    num_stages: int


def load(name: str) -> ModuleType:
    """A module of `fused`, by its file: the package would import torch."""
    spec = spec_from_file_location(f"fused_{name}", FUSED / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


POINTERS = {"x", "w13", "w2", "scale", "inner", "parts", "out", "topk_ids", "topk_weights"}
POINTERS |= {"sorted_slots", "block_expert", "block_begin", "block_end", "counts", "totals"}
DTYPES = {"16-bit": "bf16", "fp8": "bf16", "float32": "fp32"}


def pointer(name: str, kind: str) -> str:
    if name in ("w13", "w2") and kind == "fp8":
        return "*fp8e4nv"
    if name in ("x", "w13", "w2", "inner", "parts", "out"):
        return f"*{DTYPES[kind]}"
    if name == "scale":
        return "*bf16"
    return {"topk_ids": "*i64", "topk_weights": "*fp32"}.get(name, "*i32")


def case(
    kernels: ModuleType,
    kernel: str,
    kind: str,
    capability: int,
    values: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Case:
    """What a launch with these values would compile; None is a pointer that is not given."""
    signature, constants, divisible = {}, {}, set()
    for name in getattr(kernels, kernel).arg_names:
        if name.isupper() or name in values and values[name] in (None, 1):
            signature[name], constants[name] = "constexpr", values[name]
        elif name in POINTERS:
            signature[name] = pointer(name, kind)
            divisible.add(name)
        else:
            signature[name] = "i64" if values[name] >= 2**31 else "i32"
            if values[name] % 16 == 0:
                divisible.add(name)
    return Case(
        kernel,
        kind,
        capability,
        tuple(signature.items()),
        tuple(constants.items()),
        frozenset(divisible),
        num_warps,
        num_stages,
    )


def products(kernels: ModuleType, model: Model, kind: str, tiles: Any, cc: int) -> Iterator[Case]:
    """Both products of a model, sorted, and for the smallest tile unsorted as well."""
    hidden, inner = model.hidden_size, model.inner_size
    for tile, name, rows, columns, depth in (
        (tiles.gate_up, "gate_up", 2 * inner, inner, hidden),
        (tiles.down, "down", hidden, hidden, inner),
    ):
        strides = (1, rows) if model.transposed and kind != "fp8" else (depth, 1)
        values = {
            "hidden_size": hidden,
            "inner_size": inner,
            "top_k": model.top_k,
            "max_blocks": 100,
            "first_expert": 0,
            "num_experts": 128,
            "stride_e": rows * depth,
            "stride_n": strides[0],
            "stride_k": strides[1],
            "scale_stride_e": 2 * rows * depth // 128**2,
            "scale_stride_half": rows // 2 * depth // 128**2,
            "scale_stride_n": depth // 128,
            "scale_stride_k": 1,
            "EVEN_N": columns % tile.block_n == 0,
            "EVEN_K": depth % tile.block_k == 0,
            "FP8": kind == "fp8",
            "SCALE_ROWS": 128 if kind == "fp8" else 1,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
        }
        if kind != "fp8":
            values |= {"scale": None}
            values |= {key: 0 for key in values if key.startswith("scale_stride")}
        lists = dict.fromkeys(("sorted_slots", "block_expert", "block_begin", "block_end"))
        for is_sorted in (True, False) if tile.block_m == 16 else (True,):
            found = values | {"SORTED": is_sorted} | ({} if is_sorted else lists)
            yield case(kernels, name, kind, cc, found, tile.num_warps, tile.num_stages)


def helpers(kernels: ModuleType, cc: int) -> Iterator[Case]:
    """The kernels that sort slots and add up parts."""
    sizes = {"num_slots": 100, "num_chunks": 3, "max_blocks": 100, "first_expert": 0}
    for experts in (128, 256, 512):
        bins = 2 * experts
        values = {**sizes, "num_experts": experts, "CHUNK": 64, "EXPERTS": bins, "BLOCKS": 32}
        values |= {"ROWS": 128, "COLUMNS": 32, "BLOCK_M": 64}
        for name in ("count_slots", "add_counts", "place_slots"):
            yield case(kernels, name, "16-bit", cc, values)
    for model in MODELS:
        values = {"first_expert": 0, "num_experts": 128, "hidden_size": model.hidden_size}
        values |= {"TOP_K": model.top_k, "BLOCK_N": 1024}
        yield case(kernels, "combine", "16-bit", cc, values)


def cases(kernels: ModuleType, tiles: ModuleType, instead: Any = None) -> list[Case]:
    """Everything that can be launched on these GPUs, each once; `instead`: with this tile only."""
    found: dict[Case, None] = {}
    for cc in SHARED_LIMIT:
        found |= dict.fromkeys(helpers(kernels, cc))
        table = tiles.CLASSES[tiles.gpu_class(divmod(cc, 10))]
        for (kind, _), pair in table.items():
            if kind == "fp8" and cc < 89:
                continue
            pair = tiles.Tiles(instead, instead) if instead else pair
            for model in MODELS:
                found |= dict.fromkeys(products(kernels, model, kind, pair, cc))
    return list(found)


def compile_one(case: Case) -> dict[str, Any]:
    """Compile it and say what is wrong, if anything is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = load("triton_kernels")
    function = getattr(kernels, case.kernel)
    position = {name: number for number, name in enumerate(function.arg_names)}
    source = ASTSource(
        function,
        dict(case.signature),
        constexprs={(position[name],): value for name, value in case.constants},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in case.divisible},
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": True,
    }
    made = triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)
    usage, sass = disassembled(made.asm["cubin"])
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    constants = dict(case.constants)
    wrong = []
    if spills:
        wrong.append(f"{spills} spills")
    if made.metadata.shared > SHARED_LIMIT[case.capability]:
        wrong.append(f"{made.metadata.shared} bytes of shared memory")
    if case.kernel in ("gate_up", "down") and case.kind in MATRIX:
        pattern = MATRIX[case.kind][case.capability]
        if constants["BLOCK_M"] < 64:
            pattern = f"{pattern}|{SMALL_MATRIX[case.kind]}"
        if not re.search(pattern, sass):
            wrong.append(f"no {pattern}: {sorted(set(re.findall(r'[A-Z]*MMA', sass)))}")
    return {
        "kernel": case.kernel,
        "kind": case.kind,
        "capability": case.capability,
        "tile": [constants.get(f"BLOCK_{axis}") for axis in "MNK"],
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "registers": registers,
        "shared": made.metadata.shared,
        "wrong": wrong,
    }


def disassembled(cubin: bytes) -> tuple[str, str]:
    """What a compiled kernel uses, and its instructions."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(option: str) -> str:
            command = [tools / "cuobjdump", option, file.name]
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            return done.stdout.decode()

        return run("--dump-resource-usage"), run("-sass")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile all kernels offline.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="kinds, capabilities or kernels, as a pattern")
    parser.add_argument("--tile", help="instead of the table: block_m,n,k,num_warps,num_stages")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        tiles = load("tiles")
        instead = tiles.Tile(*map(int, given.tile.split(","))) if given.tile else None
        todo = cases(load("triton_kernels"), tiles, instead)
        todo = [c for c in todo if re.search(given.only, f"{c.kernel} {c.kind} {c.capability}")]
        bad = 0
        with ProcessPoolExecutor(given.jobs) as pool:
            for result in pool.map(compile_one, todo):
                print(json.dumps(result), flush=True)
                bad += bool(result["wrong"])
    print(f"{len(todo)} kernels, {bad} bad", file=sys.stderr)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
