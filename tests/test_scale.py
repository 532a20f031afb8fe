"""Released models at their true size: counts, bytes, and the memory that planning takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.tiny_checkpoint import nbytes
from reshard.config import ModelConfig
from reshard.names import component_key, component_of
from tests.checkpoints import build, config, inventory, write_sparse

ROOT = Path(__file__).resolve().parent.parent

# --- published numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "tensors", "size"),
    [
        ("Qwen3.5-35B-A3B", 1811, 71_903_655_008),
        ("Qwen3.5-35B-A3B-MXFP4", 63_171, None),
        ("Qwen3.6-35B-A3B", 1045, 71_903_645_408),
        ("Qwen3.6-35B-A3B-FP8", 64_196, 37_454_789_472),
        ("Qwen3.5-122B-A10B", 1949, 250_173_007_840),
        ("Qwen3.5-397B-A17B", 2924, 806_795_875_168),
        ("Qwen3.5-397B-A17B-FP8", 189_042, 406_125_181_280),
        ("Qwen3-VL-30B-A3B", 882, 62_141_508_064),
        ("Qwen3-VL-235B-A22B", 1388, 471_340_045_792),
    ],
)
def test_tensors_and_bytes_of_a_release(release: str, tensors: int, size: int | None) -> None:
    found = inventory(release)
    assert len(found) == tensors
    if size is not None:
        assert sum(nbytes(dtype, shape) for dtype, shape in found.values()) == size


def by_component(release: str) -> tuple[Counter[str], Counter[str]]:
    """Tensors and bytes of a release by component, as reshard names them."""
    facts = ModelConfig.from_json(config(release))
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, (dtype, shape) in inventory(release).items():
        component = component_of(name, facts)
        assert component is not None, name
        counts[component_key(component)] += 1
        sizes[component_key(component)] += nbytes(dtype, shape)
    return counts, sizes


@pytest.mark.parametrize(
    ("release", "text", "visual", "mtp"),
    [
        ("Qwen3.5-35B-A3B", 693, 333, 785),
        ("Qwen3.6-35B-A3B", 693, 333, 19),
        ("Qwen3.6-35B-A3B-FP8", 64_196 - 333 - 1560, 333, 1560),
        ("Qwen3.5-35B-A3B-MXFP4", 62_053, 333, 785),
        ("Qwen3-VL-30B-A3B", 531, 351, 0),
        ("Qwen3-VL-235B-A22B", 1037, 351, 0),
    ],
)
def test_tensors_of_the_components(release: str, text: int, visual: int, mtp: int) -> None:
    counts, _ = by_component(release)
    assert counts["layers"] + counts["embed"] + counts["head"] == text
    assert (counts["visual"], counts["mtp"]) == (visual, mtp)


@pytest.mark.parametrize(
    ("release", "embed", "visual", "mtp"),
    [
        ("Qwen3.5-35B-A3B", 1_017_118_720, 893_142_496, 1_689_281_536),
        ("Qwen3.5-122B-A10B", 1_525_678_080, 902_581_728, 5_047_358_464),
        ("Qwen3.5-397B-A17B", 2_034_237_440, 912_020_960, 13_191_136_256),
        ("Qwen3-VL-30B-A3B", 622_329_856, 1_077_262_816, 0),
        ("Qwen3-VL-235B-A22B", 1_244_659_712, 1_152_776_672, 0),
    ],
)
def test_bytes_of_the_components(release: str, embed: int, visual: int, mtp: int) -> None:
    _, sizes = by_component(release)
    assert (sizes["embed"], sizes["visual"], sizes["mtp"]) == (embed, visual, mtp)


# --- planning the largest -------------------------------------------------------------------------


class Planned(NamedTuple):
    """The document of a plan, and the most memory that the process had, in bytes."""

    document: dict[str, Any]
    peak: int


_MEASURED = """\
import atexit, re, sys
from reshard.cli import main
status = lambda: re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
atexit.register(lambda: print(status(), file=sys.stderr))
main()
"""


def measured(command: str, *arguments: object) -> Planned:
    """Run a command of reshard with `--json` in a process of its own."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc, which this system lacks")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, command, *map(str, arguments), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return Planned(json.loads(done.stdout), 1024 * int(done.stderr.split()[-1]))


def plan(source: Path, *options: str) -> Planned:
    return measured("plan", source, *options)


def sparse(path: Path, release: str) -> Path:
    """The release at its true size, in files that are mostly holes."""
    try:
        return write_sparse(path, release, shards=94)
    except OSError as error:
        pytest.skip(f"the file system of {path} takes no sparse files of this size: {error}")


def check_sums(document: dict[str, Any], tensors: int, size: int) -> None:
    """Stages and source agree: what the stages hold is the source and the declared replicas."""
    assert document["source"]["tensors"] == tensors
    assert document["source"]["bytes"] == size
    replicas = sum(replica["bytes"] for replica in document["replicated"])
    excluded = sum(exclusion["bytes"] for exclusion in document["excluded"])
    assert sum(stage["bytes"] for stage in document["stages"]) == size + replicas - excluded
    for stage in document["stages"]:
        assert stage["bytes"] == sum(stage["components"].values())
        assert stage["tensors"] == sum(file["tensors"] for file in stage["files"])
        headers = sum(file["bytes"] for file in stage["files"]) - stage["bytes"]
        assert headers >= 4096 * len(stage["files"])
        assert headers % 4096 == 0


def test_the_largest_model(tmp_path: Path) -> None:
    source = sparse(tmp_path, "Qwen3.5-397B-A17B")
    document, peak = plan(source, "--pp-size", "4")
    check_sums(document, 2924, 806_795_875_168)
    assert document["warnings"] == document["notes"] == []
    assert document["layers"] == [15, 15, 15, 15]
    embed = 2_034_237_440
    assert document["replicated"] == [{"component": "embed", "stage": 3, "bytes": embed}]
    first, _, _, last = (stage["components"] for stage in document["stages"])
    linear, attention = 13_150_315_392, 13_124_002_816
    assert first == {"visual": 912_020_960, "embed": embed, "layers": 12 * linear + 3 * attention}
    assert last["mtp"] == 13_191_136_256
    assert last["head"] == embed + 2 * 4096
    assert peak < 80_000_000

    balanced, _ = plan(source, "--pp-size", "4", "--balance", "--exclude", "mtp")
    check_sums(balanced, 2924, 806_795_875_168)
    assert balanced["replicated"] == []
    assert [e["bytes"] for e in balanced["excluded"]] == [13_191_136_256]


def test_the_most_tensors(tmp_path: Path) -> None:
    source = sparse(tmp_path, "Qwen3.5-397B-A17B-FP8")
    document, peak = plan(source, "--pp-size", "8", "--engine", "vllm")
    check_sums(document, 189_042, 406_125_181_280)
    assert document["layers"] == [7, 7, 7, 8, 8, 8, 8, 7]
    assert [r["stage"] for r in document["replicated"]] == [1, 2, 3, 4, 5, 6, 7]
    assert {r["component"] for r in document["replicated"]} == {"embed"}
    assert peak < 300_000_000


def test_copying_adds_little_memory(tmp_path: Path) -> None:
    """Files of 40 MB are moved in pieces of one: by several threads, hashed or not."""
    source = build(
        tmp_path / "source",
        hidden_size=512,
        moe_intermediate_size=768,
        experts=16,
        mtp=None,
    )
    assert sum(path.stat().st_size for path in source.iterdir()) > 300_000_000
    planned = measured("plan", source, "--pp-size", 2)
    for number, options in enumerate((["--jobs", 4], ["--jobs", 2, "--no-checksum"])):
        out = tmp_path / str(number)
        made = measured("split", source, out, "--pp-size", 2, "--quiet", *options)
        assert made.document["written"] == 11
        assert made.peak < planned.peak + 64_000_000
        assert made.peak < 100_000_000
        checked = measured("verify", out, "--source", source)
        assert checked.document["ok"]
        assert checked.peak < planned.peak + 64_000_000
