"""Every kernel compiles for every GPU class: no spills, within shared memory, matrix instructions.

`compile_kernels.py` does it, in processes of its own, for triton must not be its interpreter there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from reshard.runtime.fused.tiles import CLASSES

ROOT = Path(__file__).resolve().parent.parent
OLDEST = ROOT / ".venv-triton-3.6" / "bin" / "python"


def compiled(python: Path | str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """How it ended, and what it says of each kernel."""
    done = subprocess.run(
        [python, ROOT / "tests" / "compile_kernels.py", *arguments],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("python", [sys.executable, OLDEST], ids=["newest", "oldest"])
def test_every_kernel_compiles_well(python: Path | str) -> None:
    if not Path(python).exists():
        pytest.skip("make check installs the oldest triton that is supported")
    code, results = compiled(python)
    bad = [result for result in results if result["wrong"]]
    assert code == 0 and not bad, "\n".join(map(str, bad))
    seen = {(r["kernel"], r["kind"], r["capability"], *r["tile"]) for r in results}
    for capability, table in ((80, "small"), (89, "small"), (90, "large"), (100, "large")):
        for (kind, _), tiles in CLASSES[table].items():
            if kind == "fp8" and capability < 89:
                continue
            for kernel, tile in (("gate_up", tiles.gate_up), ("down", tiles.down)):
                size = tile.block_m, tile.block_n, tile.block_k
                assert (kernel, kind, capability, *size) in seen


def test_a_tile_that_is_too_large_is_seen() -> None:
    """What spills, or needs more shared memory than a GPU has, would else be known at a launch."""
    code, results = compiled(sys.executable, "--tile", "128,128,128,4,3", "--only", "16-bit 89")
    wrong = " ".join(fault for result in results for fault in result["wrong"])
    assert code == 1 and "spills" in wrong and "shared memory" in wrong, results
