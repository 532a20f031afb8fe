"""What `reshard split org/name --stage K` fetches, and how fast, from a Hub on loopback.

`python benchmarks/hub.py` prints two tables. The first counts, for each stage of released models at
their true size, the bytes that are needed, the bytes that the planned requests bring, and these
requests; headers are fetched for real and counted by the server. The second fetches one stage for
real, in turns with a plain download of as many bytes over one connection by the same HTTP client;
each has its output on the disk (fsync) before its clock stops.

The weights are holes in sparse files, so no disk feeds the server; the outputs are real.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from examples import tiny_checkpoint as tiny
from reshard import build_plan, open_checkpoint
from reshard.fetch import layout
from reshard.ranges import plan_requests
from reshard.tasks import FileTask
from tests.checkpoints import RELEASES, config, inventory
from tests.hub_server import Blob, HubServer

SHARD_BYTES = 5e9  # what save_pretrained writes, and most releases have
RESHARD = [sys.executable, str(REPOSITORY / "cli.py")]
PLAIN = """
import os, sys
from huggingface_hub import get_session
with get_session().stream("GET", sys.argv[1]) as reply, open(sys.argv[2], "wb") as file:
    for piece in reply.iter_raw():
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())
"""


def write_release(path: Path, model: str) -> Path:
    """A release as transformers saves it: shards filled in order, each sorted by dtype and name."""
    path.mkdir()
    shards: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    filled = 0.0
    total = 0
    for name, (dtype, shape) in inventory(model).items():
        size = tiny.nbytes(dtype, shape)
        if filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape, size)
        filled += size
        total += size
    files = {}
    for number, tensors in enumerate(shards, 1):
        order = sorted(tensors, key=lambda name: (-tiny.BITS[tensors[name][0]], name))
        sized = {name: tensors[name] for name in order}
        file = tiny.SHARD_NAME.format(number, len(shards))
        header = tiny.encode_header(sized, tiny.FORMAT)
        (path / file).write_bytes(header)
        os.truncate(path / file, len(header) + sum(size for _, _, size in sized.values()))
        files[file] = order
    tiny.write_index(path, files, total)
    tiny.write_json(path / "config.json", config(model))
    tiny.write_side_files(path)
    return path


def serve(hub: HubServer, path: Path, repo: str) -> None:
    """Put a release on the Hub; nobody has to hash holes for that."""
    named = {
        file.name: sha256(f"{repo}/{file.name}".encode()).hexdigest() for file in path.iterdir()
    }
    weights = {f.name: Blob(f, named[f.name]) for f in path.glob("*.safetensors")}
    others = {f.name: f.read_bytes() for f in path.iterdir() if f.suffix != ".safetensors"}
    hub.create(repo, {**weights, **others})


def served(hub: HubServer) -> tuple[int, int]:
    """Requests to the Hub and bytes of their replies, since the last `forget`."""
    requests = [request for request in hub.requests if request.status in (200, 206)]
    return len(requests), sum(request.sent for request in requests)


def count(
    hub: HubServer, path: Path, model: str, pp_size: int, environment: dict[str, str]
) -> None:
    hub.forget()
    plan = [*RESHARD, "plan", f"org/{model}", "--pp-size", str(pp_size), "--json"]
    began = time.perf_counter()
    subprocess.run(plan, check=True, capture_output=True, env=environment)
    seconds = time.perf_counter() - began
    requests, nbytes = served(hub)
    print(
        f"\n{model}, {pp_size} stages; `plan`: {nbytes:,} bytes in {requests} requests, {seconds:.1f} s"
    )
    print("\n| stage | bytes needed | bytes fetched | more | requests |\n|---|---|---|---|---|")
    made = build_plan(open_checkpoint(path), pp_size)
    for stage in made.stages:
        needed = fetched = number = 0
        for file in stage.files:
            _, segments = layout(FileTask(file.name, file.size, tensors=file.tensors))
            asked = plan_requests(segments)
            needed += file.tensor_bytes
            fetched += sum(request.end - request.begin for request in asked)
            number += len(asked)
        more = (fetched + nbytes) / needed - 1
        print(f"| {stage.stage} | {needed:,} | {fetched + nbytes:,} | {more:.3%} | {number:,} |")


def race(
    hub: HubServer,
    model: str,
    pp_size: int,
    stage: int,
    runs: int,
    work: Path,
    environment: dict[str, str],
) -> None:
    out = work / "out"
    split = [*RESHARD, "split", f"org/{model}", str(out), "--pp-size", str(pp_size)]
    split += ["--stage", str(stage), "--json"]

    def measure(command: list[str]) -> float:
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(exist_ok=True)
        os.sync()
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return time.perf_counter() - began

    hub.forget()
    measure(split)
    requests, nbytes = served(hub)
    needed = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    blob = work / "blob"
    blob.touch()
    os.truncate(blob, needed)
    hub.create("org/plain", {"plain.safetensors": Blob(blob, "0" * 64)})
    url = f"{hub.endpoint}/org/plain/resolve/main/plain.safetensors"
    contenders: dict[str, Callable[[], float]] = {
        "one plain stream": lambda: measure(
            [sys.executable, "-c", PLAIN, url, str(work / "plain")]
        ),
        "split --no-checksum": lambda: measure([*split, "--no-checksum"]),
        "split": lambda: measure(split),
        "split --jobs 2": lambda: measure([*split, "--jobs", "2"]),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name in random.sample(list(contenders), len(contenders)):
            times[name].append(contenders[name]())
    print(
        f"\n{model}, stage {stage} of {pp_size}: {needed:,} bytes of weight files, {nbytes:,} served "
        f"in {requests} replies ({nbytes / needed - 1:+.3%})"
    )
    print("\n| what | median s | MB/s | against one stream | min-max s |\n|---|---|---|---|---|")
    plain = median(times["one plain stream"])
    for name, seconds in times.items():
        middle = median(seconds)
        print(
            f"| {name} | {middle:.2f} | {needed / middle / 1e6:,.0f} | {plain / middle:.2f} | "
            f"{min(seconds):.2f}-{max(seconds):.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", choices=sorted(RELEASES), default="Qwen3.5-35B-A3B")
    parser.add_argument("--pp-size", type=int, default=16)
    parser.add_argument("--stage", type=int, default=5)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="reshard-benchmark-", dir=arguments.dir))
    try:
        with HubServer(work / "storage") as hub:
            environment = {**os.environ, **hub.environment(work / "home")}
            for model, pp_size in (("Qwen3.5-397B-A17B", 4), ("Qwen3.5-397B-A17B-FP8", 4)):
                path = write_release(work / model, model)
                serve(hub, path, f"org/{model}")
                count(hub, path, model, pp_size, environment)
            model = arguments.model
            serve(hub, write_release(work / f"race-{model}", model), f"org/{model}")
            race(hub, model, arguments.pp_size, arguments.stage, arguments.runs, work, environment)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
