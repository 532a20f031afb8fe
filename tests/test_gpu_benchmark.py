"""`benchmarks/gpu_experts.py` without a GPU: the whole program, at toy sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "gpu_experts.py"
CASES = {
    "Qwen3.5-35B-A3B bf16",
    "Qwen3.5-35B-A3B fp8",
    "Qwen3-VL-235B-A22B bf16, transposed",
    "Qwen3.5-397B-A17B bf16",
    "Qwen3.5-397B-A17B fp8",
}


def test_a_dry_run_checks_and_times_every_case_and_claims_nothing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--dry", "--out", out, "--dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    checks = [row for row in rows if row["row"] == "Check"]
    timings = [row for row in rows if row["row"] == "Timing"]
    assert all(row["ok"] for row in checks + timings)
    assert {row["case"] for row in timings} == CASES
    assert {row["case"] for row in checks} > CASES
    assert {row["implementation"] for row in timings} == {"own", "torch", "transformers"}
    assert {row["what"] for row in checks} >= {"EP halves", "TP halves", "graph again"}
    assert any("load_stage, cold" in row.get("what", "") for row in rows)
    assert done.stdout.count("not run (dry)") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
