"""How fast one stage is loaded on the CPU, against safetensors and against filtering the checkpoint.

`python benchmarks/load.py` writes a checkpoint of noise, splits it into four stages and loads the
second one in each of these ways, in turns, in a new random order every round:

* `load_stage`, mapped or read, whole or a quarter of the experts;
* safetensors' `load_file` on the files of the stage;
* the whole checkpoint, filtered by layer as engines do: each tensor is got, and dropped if it is not
  of the stage; or got only if its name is.

Every way ends with each page of the tensors touched. Each run is a fork of a process that has
imported everything, and starts with the same state of caches and memory. Only figures of one table
compare. Linux only; a cold cache needs root, for `/proc/sys/vm/drop_caches`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.split import DROP_CACHES, LAYERS, STAGES, dims, facts, memory, note
from examples import tiny_checkpoint as tiny
from reshard import build_plan, open_checkpoint, split
from reshard.bundle import stage_directory
from reshard.runtime import load_stage
from tests.checkpoints import RELEASES, Model, build, config, inventory

STAGE = 1
WITHIN = range(STAGE * LAYERS // STAGES, (STAGE + 1) * LAYERS // STAGES)
SHARDS = 3
PAGE = 4096
BASE = "load_stage, read"

_LAYER = re.compile(r"model\.language_model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Run:
    """One measured load.

    asked: bytes that it read by system calls; disk: that came from the disk. held: of its tensors.
    rss: by how much the most memory that was resident, pages of mapped files included, exceeded that
    before.
    """

    seconds: float
    asked: int
    disk: int
    held: int
    rss: int


# --- the contenders -------------------------------------------------------------------------------

Tensors = Mapping[str, Tensor]


def reshard_stage(stage: Path, source: Path, *, mmap: bool, ranks: int = 1) -> Tensors:
    return load_stage(stage, device="cpu", mmap=mmap, ep=(0, ranks)).tensors


def stage_files(stage: Path, source: Path) -> Tensors:
    files = sorted(stage.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def is_wanted(name: str) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) in WITHIN


def get_then_drop(stage: Path, source: Path) -> Tensors:
    """The shape of vLLM's and SGLang's iterators: all tensors pass by, a rank keeps its own."""
    kept = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                if is_wanted(name):
                    kept[name] = tensor
    return kept


def name_first(stage: Path, source: Path) -> Tensors:
    kept: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            kept |= {n: opened.get_tensor(n) for n in opened.keys() if is_wanted(n)}  # noqa: SIM118
    return kept


CONTENDERS: dict[str, Callable[[Path, Path], Tensors]] = {
    "load_stage, mapped": partial(reshard_stage, mmap=True),
    BASE: partial(reshard_stage, mmap=False),
    "load_stage, read, ep=(0, 4)": partial(reshard_stage, mmap=False, ranks=4),
    "load_file, files of the stage": stage_files,
    "whole checkpoint, name first": name_first,
    "whole checkpoint, get and drop": get_then_drop,
}


def touch(tensors: Iterable[Tensor]) -> int:
    """Use every page once; the bytes of all tensors."""
    held = 0
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8)
        data[::PAGE].amax()
        held += tensor.nbytes
    return held


# --- measuring ------------------------------------------------------------------------------------


def field(file: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(file).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def prepare(stage: Path, source: Path, touched: int, *, cold: bool) -> None:
    """The same start for everyone: caches as asked, and memory that the machine really has.

    Some virtual machines hand free memory back to their host about two seconds later, and get it
    again only slowly. A process that touches memory just before takes that wait off the load.
    """
    os.sync()
    if cold:
        DROP_CACHES.write_text("3")
    else:
        files = [str(file) for root in (stage, source) for file in root.glob("*.safetensors")]
        subprocess.run(["cat", *files], check=True, stdout=subprocess.DEVNULL)
    touched = min(touched, int(memory("MemFree") * 0.85))
    subprocess.run([sys.executable, "-c", f"bytearray({touched})"], check=True)


def measure(load: Callable[[Path, Path], Tensors], stage: Path, source: Path) -> Run:
    """Load in a fork of this process."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = field("/proc/self/status", "VmRSS")
            start = time.perf_counter()
            tensors = load(stage, source)
            held = touch(tensors.values())
            seconds = time.perf_counter() - start
            asked, disk = (field("/proc/self/io", name) for name in ("rchar", "read_bytes"))
            rss = (field("/proc/self/status", "VmHWM") - before) << 10
            os.write(send, json.dumps(asdict(Run(seconds, asked, disk, held, rss))).encode())
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not result:
        sys.exit("a contender failed")
    return Run(**json.loads(result))


def warm_up(work: Path) -> None:
    """Use all code once, so that no run has to fetch any of it; forks must not inherit threads."""
    torch.set_num_threads(1)
    source = build(work / "tiny")
    split(build_plan(open_checkpoint(source), STAGES), work / "tiny-out")
    for load in CONTENDERS.values():
        touch(load(work / "tiny-out" / stage_directory(STAGE, STAGES), source).values())


def compare(work: Path, size: int, runs: int, *, cold: bool) -> dict[str, list[Run]]:
    """Let the contenders take turns."""
    source, stage = work / "source", work / "out" / stage_directory(STAGE, STAGES)
    results: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    for number in range(runs):
        for name in random.sample(list(CONTENDERS), len(CONTENDERS)):
            note(f"{'cold' if cold else 'warm'}, round {number + 1} of {runs}: {name}")
            prepare(stage, source, size + (2 << 30), cold=cold)
            results[name].append(measure(CONTENDERS[name], stage, source))
    note("")
    return results


def show(results: Mapping[str, list[Run]], *, cold: bool) -> None:
    """Print a table."""
    runs = len(results[BASE])
    base = median(run.seconds for run in results[BASE])
    print(f"\n{'Cold' if cold else 'Warm'} cache, {runs} runs\n")
    columns = ["what", "median s", f"against `{BASE}`", "min-max s", "MB held", "MB read by calls"]
    columns += ["MB from the disk"] * cold + ["peak RSS MB"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name, done in results.items():
        times = [run.seconds for run in done]
        middle = median(times)
        row = [name, f"{middle:.3f}", f"{middle / base:.2f}", f"{min(times):.3f}-{max(times):.3f}"]
        for what in ("held", "asked", *["disk"] * cold, "rss"):
            row.append(f"{median(getattr(run, what) for run in done) / 1e6:.0f}")
        print(f"| {' | '.join(row)} |")


# --- the command line -----------------------------------------------------------------------------


def write_checkpoint(path: Path, gb: float, weights: str) -> int:
    """A Qwen3.5 MoE model of about `gb` GB, its tensors dealt to shards at random; its bytes."""
    name = f"of {gb} GB"
    RELEASES[name] = Model("qwen3_5_moe", dims(gb), weights=weights, mtp="per_expert")
    path.mkdir()
    tensors = inventory(name)
    tiny.write_shards(path, tensors, shards=SHARDS)
    tiny.write_json(path / "config.json", config(name))
    return tiny.total_bytes(tensors)


def main() -> None:
    """Make the checkpoint, measure, remove everything."""
    parser = argparse.ArgumentParser(description="Measure load_stage.")
    parser.add_argument("--gb", type=float, default=4, help="size in BF16, at least 2 (default: 4)")
    parser.add_argument("--weights", choices=["bf16", "bf16_per_expert", "fp8"], default="bf16")
    parser.add_argument("--runs", type=int, default=5, help="rounds per table (default: 5)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to make a work directory")
    parser.add_argument("--json", action="store_true", help="print every run instead of tables")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.dir) as directory:
        work = Path(directory)
        note("writing the checkpoint")
        size = write_checkpoint(work / "source", arguments.gb, arguments.weights)
        split(build_plan(open_checkpoint(work / "source"), STAGES), work / "out", checksums=False)
        warm_up(work)
        document: dict[str, object] = {"facts": facts(work, size), "weights": arguments.weights}
        if not arguments.json:
            print(f"{document['facts']}, {arguments.weights}")
        states = [False, True] if os.access(DROP_CACHES, os.W_OK) else [False]
        for cold in states:
            results = compare(work, size, arguments.runs, cold=cold)
            if not arguments.json:
                show(results, cold=cold)
            document["cold" if cold else "warm"] = {
                name: [asdict(run) for run in runs] for name, runs in results.items()
            }
        if arguments.json:
            print(json.dumps(document, indent=2))
        elif len(states) == 1:
            print("\nNot root: no measurements with a cold cache.")


if __name__ == "__main__":
    main()
