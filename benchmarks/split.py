"""How fast `reshard split` is, against copying, hashing, and loading and saving with safetensors.

`python benchmarks/split.py` makes a checkpoint of random bytes and prints one table for a warm and
one for a cold page cache. Only figures of one table compare: the contenders take turns, in a new
random order every round, each starts with the same state of caches and memory, and each has its
output on the disk (fsync) before its clock stops.

Linux only. A cold cache needs root, for `/proc/sys/vm/drop_caches`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from examples import tiny_checkpoint as tiny
from reshard.describe import HOWS
from reshard.version import __version__

CORES = len(os.sched_getaffinity(0))
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SHARD_BYTES = 1.5e9
STAGES = 4
LAYERS = 16

SOURCE, OUT = "{source}", "{out}"
RESHARD = [sys.executable, str(REPOSITORY / "cli.py")]
SPLIT = [*RESHARD, "split", SOURCE, OUT, "--pp-size", str(STAGES), "--json"]
LOAD_AND_SAVE = [sys.executable, str(REPOSITORY / "benchmarks" / "load_and_save.py")]
COPY = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
HASH = f'find "$0" -name "*.safetensors" -print0 | xargs -0 -n 1 -P {CORES} '
CONTENDERS = {
    "cp -r": ["sh", "-c", COPY, SOURCE, OUT],
    "split --no-checksum": [*SPLIT, "--no-checksum"],
    "split": SPLIT,
    "load and save": [*LOAD_AND_SAVE, SOURCE, OUT, str(STAGES)],
    "sha256sum": ["sh", "-c", HASH + "sha256sum", SOURCE],
}
if shutil.which("openssl"):  # with the processor's SHA instructions, as Python's hashlib
    CONTENDERS["openssl sha256"] = ["sh", "-c", HASH + "openssl dgst -sha256", SOURCE]


class Run(NamedTuple):
    """One measured process: wall time, and the most memory that it or a child of it took."""

    seconds: float
    rss_mb: float


# --- the checkpoint -------------------------------------------------------------------------------


def dims(gb: float) -> tiny.Dims:
    """Sizes of a Qwen3.5 MoE model of about `gb` GB: a real layer, with fewer experts."""
    sizes = tiny.Dims(
        hidden_size=2048,
        num_hidden_layers=LAYERS,
        vocab_size=32000,
        num_experts=1,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_attention_heads=16,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    one, two = (tiny.total_bytes(tiny.checkpoint(replace(sizes, num_experts=n))) for n in (1, 2))
    return replace(sizes, num_experts=max(2, round(1 + (gb * 1e9 - one) / (two - one))))


def write_checkpoint(path: Path, gb: float) -> int:
    """Write it to `path`, its tensors dealt to shards at random; the bytes of all shards."""
    path.mkdir()
    sizes = dims(gb)
    tensors = tiny.checkpoint(sizes)
    tiny.write_json(path / "config.json", tiny.config(sizes))
    tiny.write_side_files(path)
    dealt = list(tensors)
    random.Random(0).shuffle(dealt)
    shards = max(2, round(tiny.total_bytes(tensors) / SHARD_BYTES))
    files = {}
    noise = memoryview(os.urandom(1 << 22))
    for shard in range(shards):
        file = tiny.SHARD_NAME.format(shard + 1, shards)
        files[file] = sorted(dealt[shard::shards], key=lambda name: -tiny.BITS[tensors[name][0]])
        sized = {name: (*tensors[name], tiny.nbytes(*tensors[name])) for name in files[file]}
        with open(path / file, "wb") as out:
            out.write(tiny.encode_header(sized, tiny.FORMAT))
            for _, _, size in sized.values():
                while size:  # the same noise, but never twice from the same place
                    piece = noise[random.randrange(len(noise) // 2) :][:size]
                    size -= out.write(piece)
    tiny.write_index(path, files, tiny.total_bytes(tensors))
    os.sync()
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


# --- measuring ------------------------------------------------------------------------------------


def measure(command: list[str], source: Path, out: Path) -> Run:
    """Run a command to its end."""
    filled = [{SOURCE: str(source), OUT: str(out)}.get(part, part) for part in command]
    start = time.perf_counter()
    process = subprocess.Popen(filled, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    assert process.stderr is not None
    error = process.stderr.read().decode()
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(filled)}: exit code {process.returncode}\n{error}")
    return Run(seconds, usage.ru_maxrss / 1024)


def prepare(source: Path, out: Path, touched: int, *, cold: bool) -> None:
    """The same start for everyone: no output, nothing left to write, caches as asked.

    Some virtual machines hand free memory back to their host, and get it again only slowly. A
    process that touches memory just before takes that wait off the measured one.
    """
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    if cold:
        DROP_CACHES.write_text("3")
    else:
        subprocess.run(["sh", "-c", 'cat "$0"/* >/dev/null', source], check=True)
    touched = min(touched, int(memory("MemFree") * 0.85))
    subprocess.run([sys.executable, "-c", f"bytearray({touched})"], check=True)


def memory(field: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def compare(work: Path, size: int, runs: int, *, cold: bool) -> None:
    """Let the contenders take turns; print their table."""
    source, out = work / "source", work / "out"
    results: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    for number in range(runs):
        for name in random.sample(list(CONTENDERS), len(CONTENDERS)):
            note(f"{'cold' if cold else 'warm'}, round {number + 1} of {runs}: {name}")
            prepare(source, out, size * (2 if cold else 1) + (2 << 30), cold=cold)
            results[name].append(measure(CONTENDERS[name], source, out))
    shutil.rmtree(out, ignore_errors=True)
    note("")
    print(f"\n{'Cold' if cold else 'Warm'} cache, {runs} runs\n")
    print("| what | median s | against `cp -r` | GB/s | min-max s | peak RSS MB |")
    print("|---|---|---|---|---|---|")
    base = median(run.seconds for run in results["cp -r"])
    for name, done in results.items():
        times = [run.seconds for run in done]
        middle = median(times)
        rss = max(run.rss_mb for run in done)
        print(
            f"| {name} | {middle:.2f} | {middle / base:.2f} | {size / middle / 1e9:.2f} "
            f"| {min(times):.2f}-{max(times):.2f} | {rss:.0f} |"
        )


def repartition(work: Path) -> None:
    """Split an output for other numbers of stages: its files are linked, not copied."""
    first, second = work / "first", work / "second"
    measure(SPLIT, work / "source", first)
    for stages in (2 * STAGES, STAGES // 2):
        shutil.rmtree(second, ignore_errors=True)
        command = [*RESHARD, "split", str(first), str(second), "--pp-size", str(stages), "--json"]
        start = time.perf_counter()
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - start
        document = json.loads(done.stdout)
        counts = ", ".join(f"{document[how]} {how}" for how in HOWS if document[how])
        print(f"\nFrom {STAGES} to {stages} stages: {seconds:.2f} s, {counts}")


# --- the command line -----------------------------------------------------------------------------


def facts(work: Path, size: int) -> str:
    """What figures depend on."""
    names = re.search("^model name.*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = names[1] if names else platform.machine()
    df = subprocess.run(["df", "--output=fstype", work], check=True, capture_output=True, text=True)
    shards = len(list(work.glob("source/*.safetensors")))
    return (
        f"{size / 1e9:.2f} GB in {shards} shards, {STAGES} stages of {LAYERS // STAGES} layers\n"
        f"{CORES} cores, {cpu}, {memory('MemTotal') / 1e9:.0f} GB of memory\n"
        f"{df.stdout.split()[-1]}, Linux {platform.release()}\n"
        f"Python {platform.python_version()}, reshard {__version__}, "
        f"torch {version('torch')}, safetensors {version('safetensors')}"
    )


def note(message: str) -> None:
    """Say on a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Make the checkpoint, measure, remove everything."""
    parser = argparse.ArgumentParser(description="Measure reshard split.")
    parser.add_argument("--gb", type=float, default=8, help="size, at least 2 (default: 8)")
    parser.add_argument("--runs", type=int, default=5, help="rounds per table (default: 5)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to make a work directory")
    parser.add_argument(
        "--repartition", action="store_true", help="measure splitting an output again instead"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.dir) as directory:
        work = Path(directory)
        note("writing the checkpoint")
        size = write_checkpoint(work / "source", arguments.gb)
        print(facts(work, size))
        if arguments.repartition:
            repartition(work)
            return
        compare(work, size, arguments.runs, cold=False)
        if os.access(DROP_CACHES, os.W_OK):
            compare(work, size, arguments.runs, cold=True)
        else:
            print("\nNot root: no measurements with a cold cache.")


if __name__ == "__main__":
    main()
