"""How right and how fast the own kernels run one real layer's experts on an NVIDIA GPU.

`python benchmarks/gpu_experts.py --out rows.jsonl` takes less than five minutes: it writes a JSON
line for each result at once, begins nothing after 270 s, and prints tables and a verdict on each
target. `--dry` is the same program on the CPU at toy sizes: it shows that the program works, its
figures mean nothing.

First come the device's rates, then results against float64, then times. Peers are torch's grouped
matrix product (the `grouped` backend) and transformers with its `grouped_mm`, on the same tensors.

graph: the median replay of one CUDA graph of 8 calls, over 8; each has a routing of its own, so
none finds its weights in the L2 cache. eager: the median call after the L2 was overwritten, launch
gaps included, as triton's `do_bench` measures. floor: the time of the bytes (each expert that was
hit once, hidden states in and out, what lies between the products written and read) or of the FLOP,
whichever is longer, at the rates measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module, metadata
from math import inf, isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TextIO, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.split import write_checkpoint
from examples import tiny_checkpoint as tiny
from reshard import build_plan, open_checkpoint, split
from reshard.runtime import ExpertWeights, fused_experts, load_stage
from reshard.runtime.fused import BACKENDS, Backend
from reshard.runtime.fused.reference import expert_matrices
from reshard.runtime.measure import Rates, measure_rates
from reshard.version import __version__

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LIMIT_BF16 = 8e-3  # rounding alone gives 3e-3 to 6e-3
LIMIT_FP8 = 2e-2  # against a reference that rounds to FP8 where the kernels do
LIMIT_FP8_EXACT = 1e-1  # against one that does not: that rounding alone is 4e-2 to 5e-2
LIMIT_PEER = 2e-2  # transformers rounds the router's weights, too
NO_TIME = "no time left"
ROUTINGS = 8
TOKENS, DRY_TOKENS = (1, 8, 64, 512, 4096, 16384), (1, 8, 64)


class Case(NamedTuple):
    """A sparse layer. transposed: it lies `[E, H, 2I]`, `[E, I, H]`. peer: in transformers."""

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    peer: str
    transposed: bool = False
    block: int | None = None  # of FP8 scales

    def __str__(self) -> str:
        layout = ", transposed" if self.transposed else ""
        return f"{self.name} {'fp8' if self.block else 'bf16'}{layout}"


SMALL = Case("Qwen3.5-35B-A3B", 2048, 512, 256, 8, "qwen3_5_moe.Qwen3_5Moe")
VISION = Case("Qwen3-VL-235B-A22B", 4096, 1536, 128, 8, "qwen3_vl_moe.Qwen3VLMoeText", True)
LARGE = Case("Qwen3.5-397B-A17B", 4096, 1024, 512, 10, "qwen3_5_moe.Qwen3_5Moe")


def fp8(case: Case) -> Case:
    """FP8 releases of both families have separate experts, which are stacked like fused ones."""
    return case._replace(transposed=False, block=128)


TIMED = SMALL, fp8(SMALL), VISION, LARGE, fp8(LARGE)


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """What was found out of the machine, or of loading; None where it was not, and why."""

    what: str
    value: float | str | None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """One result against its reference."""

    case: str
    what: str
    tokens: int
    reference: str
    rel_l2: float
    limit: float
    ok: bool


@dataclass(frozen=True)
class Timing:
    """One implementation on one number of tokens. ok: None where no result was compared."""

    case: str
    implementation: str
    tokens: int
    distinct: float
    bytes: int
    flop: int
    floor_us: float
    bound: str
    rel_l2: float | None = None
    ok: bool | None = None
    eager_us: float | None = None
    graph_us: float | None = None
    of_floor: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    note: str = ""


Row = Fact | Check | Timing


class Batch(NamedTuple):
    hidden: Tensor
    ids: Tensor
    weights: Tensor


Implementation = Callable[[Batch], Tensor]
T = TypeVar("T")


@dataclass
class Bench:
    """What every part needs, and the rows so far."""

    device: torch.device
    backend: Backend
    out: TextIO
    deadline: float
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"
        self.tokens = TOKENS if self.cuda else DRY_TOKENS
        self.repeats = 20 if self.cuda else 2
        self.random = torch.Generator(self.device).manual_seed(0)
        size = 1 << (28 if self.cuda else 18)
        self.flush = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.stream: Any = None
        self.rates = Rates(1, 1)
        self.fp8_rate: float | None = None

    def sized(self, case: Case) -> Case:
        """In a dry run a toy, with H neither 2I nor I: else a shape would not tell the layout."""
        toy = case._replace(hidden=96, inner=64, experts=32, top_k=4, block=case.block and 32)
        return case if self.cuda else toy

    def add(self, row: Row) -> None:
        finite = {k: v for k, v in asdict(row).items() if not isinstance(v, float) or isfinite(v)}
        print(json.dumps({"row": type(row).__name__, **finite}), file=self.out, flush=True)
        self.rows.append(row)

    def attempt(self, what: str, needed: float, work: Callable[..., T], *given: Any) -> T | None:
        """Do it, if it can be done in the time left: `needed` seconds.

        A kernel that cannot be built or run costs its own rows only. Where the device is lost, as
        after an illegal access, nothing else can run: that raises.
        """
        if time.monotonic() + needed > self.deadline:
            self.add(Fact(what, None, NO_TIME))
            return None
        try:
            return work(self, *given)
        except Exception as error:  # noqa: BLE001
            reason = (str(error).splitlines() or [""])[0][:200]
            self.add(Fact(what, None, f"{type(error).__name__}: {reason}"))
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return None

    def implementation(self, experts: ExpertWeights, backend: Backend) -> Implementation:
        return lambda batch: fused_experts(batch.hidden, experts, batch.ids, batch.weights, backend)

    def own(self, experts: ExpertWeights) -> Implementation:
        return self.implementation(experts, self.backend)


# --- weights, inputs, references ------------------------------------------------------------------


def make(bench: Bench, case: Case) -> ExpertWeights:
    """Random experts whose output is of the order of 1, in the layout of the case."""
    block = case.block or 1
    blocks = case.inner // block, case.hidden // block
    spread = case.hidden**-0.5, (case.inner / 4) ** -0.5

    def weight(rows: int, columns: int, spread: float) -> Tensor:
        shape = (columns, rows) if case.transposed else (rows, columns)
        made = torch.empty(case.experts, *shape, dtype=BF16, device=bench.device)
        made.normal_(0, 32 if case.block else spread, generator=bench.random)  # FP8 ends at 448
        made = made.to(FP8) if case.block else made
        return made.transpose(1, 2) if case.transposed else made

    def scale(*shape: int, spread: float) -> Tensor | None:  # neighbours differ: a wrong one shows
        if not case.block:
            return None
        made = torch.rand(case.experts, *shape, device=bench.device, generator=bench.random)
        return (made + 0.5) * (spread / 32)

    return ExpertWeights(
        w13=weight(2 * case.inner, case.hidden, spread[0]),
        w2=weight(case.hidden, case.inner, spread[1]),
        w13_scale=scale(2, *blocks, spread=spread[0]),
        w2_scale=scale(*reversed(blocks), spread=spread[1]),
        block=(case.block, case.block) if case.block else None,
        first_expert=0,
        num_experts=case.experts,
    )


def make_batches(bench: Bench, case: Case, tokens: int, count: int) -> list[Batch]:
    """Random tokens. The experts of all batches are disjoint where there are enough of them."""
    options: dict[str, Any] = {"device": bench.device, "generator": bench.random}
    shape, needed = (tokens, case.top_k), count * tokens * case.top_k
    disjoint = torch.randperm(case.experts, **options)[:needed].split(tokens * case.top_k)
    batches = []
    for number in range(count):
        if needed <= case.experts:
            ids = disjoint[number].view(shape)
        else:
            ids = torch.rand(tokens, case.experts, **options).topk(case.top_k).indices
        weights = torch.rand(shape, **options) + 0.1
        hidden = torch.randn(tokens, case.hidden, **options).to(BF16)
        batches.append(Batch(hidden, ids, weights / weights.sum(-1, keepdim=True)))
    return batches


class Expected(NamedTuple):
    """What should come out, how that was computed, how far off a result may be."""

    value: Tensor
    reference: str
    limit: float


def exact(experts: ExpertWeights, batch: Batch, limit: float) -> Expected:
    precise = batch.hidden.double(), experts, batch.ids, batch.weights.double()
    return Expected(fused_experts(*precise, backend="reference"), "float64", limit)


def expected(bench: Bench, experts: ExpertWeights, batch: Batch) -> Expected:
    """The strictest there is: for FP8, one that rounds what weights are multiplied with, too."""
    if experts.block is None:
        return exact(experts, batch, LIMIT_BF16)
    x = rounded(batch.hidden.double(), experts.block[1])
    out = torch.zeros_like(x)
    for expert in batch.ids.unique().tolist():
        tokens, slots = torch.where(batch.ids == expert)
        w13, w2 = expert_matrices(experts, expert, torch.float64)
        gate, up = F.linear(x[tokens], w13).chunk(2, dim=-1)
        y = F.linear(rounded(F.silu(gate) * up, experts.block[1]), w2)
        out.index_add_(0, tokens, y * batch.weights[tokens, slots, None].double())
    limit = LIMIT_FP8 if bench.backend == "triton" else LIMIT_FP8_EXACT  # no other backend rounds
    return Expected(out, "float64, rounding to FP8", limit)


def rounded(x: Tensor, columns: int) -> Tensor:
    """Each group of columns as FP8 holds it, with a scale of its own."""
    groups = x.unflatten(-1, (-1, columns))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    held: Tensor = (groups / scale).float().to(FP8).to(x.dtype) * scale
    return held.flatten(-2)


def off(found: Tensor, wanted: Tensor) -> float:
    """The relative error, by the Euclidean norm; infinite where there is a NaN."""
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if isfinite(error) else inf


# --- running and timing ---------------------------------------------------------------------------


class Graph:
    """Calls captured as one CUDA graph; on the CPU, which has none, the calls themselves."""

    def __init__(self, bench: Bench, calls: Sequence[Callable[[], Tensor]]) -> None:
        self.calls = calls
        self.outputs: list[Tensor] = []
        self.graph = torch.cuda.CUDAGraph() if bench.cuda else None
        if self.graph is not None:
            self._capture(bench, self.graph)

    def _capture(self, bench: Bench, graph: torch.cuda.CUDAGraph) -> None:
        """Raises `RuntimeError` for calls that wait for the device, which no graph can hold.

        Those are found in the warm-up: torch's allocator does not recover from a failed capture.
        """
        if bench.stream is None:  # one for all graphs: cached memory is of the stream that took it
            bench.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before = torch.cuda.current_stream()
        bench.stream.wait_stream(before)
        with torch.cuda.stream(bench.stream):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for call in self.calls:
                    call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        before.wait_stream(bench.stream)
        torch.cuda.synchronize()
        gc.disable()  # collecting may unload a kernel of triton, which is forbidden in a capture
        try:
            with torch.cuda.graph(graph, stream=bench.stream):
                self.outputs = [call() for call in self.calls]
        finally:
            gc.enable()
            torch.cuda.set_stream(before)  # a failed capture leaves its own

    def replay(self) -> None:
        if self.graph is None:
            self.outputs = [call() for call in self.calls]
        else:
            self.graph.replay()


def seconds(bench: Bench, calls: Sequence[Callable[[], object]], flush: bool = False) -> float:
    """The median of the calls but the first two. flush: overwrite the L2 cache before each."""
    times, events = [], []
    for call in calls:
        if flush:
            bench.flush.zero_()
        start = time.perf_counter()
        if bench.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        else:
            call()
            times.append(time.perf_counter() - start)
    if bench.cuda:
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1000 for begin, end in events]
    return median(times[2:])


# --- the parts, in their order --------------------------------------------------------------------


def measure_machine(bench: Bench) -> None:
    """What it is, and what it does at best, once a second of work has brought its clocks up."""
    one = torch.randn(4096 if bench.cuda else 64, 4096, device=bench.device).to(BF16)
    end = time.monotonic() + bench.cuda
    while time.monotonic() < end:
        seconds(bench, [lambda: one @ one.t()] * 20)
    if bench.cuda:
        bench.add(Fact("device", torch.cuda.get_device_name(bench.device)))
        bench.add(Fact("properties", str(torch.cuda.get_device_properties(bench.device))))
        bench.attempt("driver and clocks", 10, nvidia_smi)
    versions = {"reshard": __version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in "triton", "transformers":
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    bench.add(Fact("versions", ", ".join(f"{name} {number}" for name, number in versions.items())))
    bench.rates = measure_rates(bench.device, BF16)
    bench.add(Fact("copy, TB/s read and written", bench.rates.bytes_per_second / 1e12))
    bench.add(Fact("bf16 product, TFLOP/s", bench.rates.flop_per_second / 1e12))
    bench.fp8_rate = bench.attempt("FP8 product: no compute floor for FP8", 10, measure_fp8)
    if bench.fp8_rate:
        bench.add(Fact("fp8 product, TFLOP/s", bench.fp8_rate / 1e12))


def measure_fp8(bench: Bench) -> float:
    """FLOP per second of a product in FP8, with one scale for each matrix."""
    size = 8192 if bench.cuda else 256
    left, right = (torch.randn(size, size, device=bench.device).to(FP8) for _ in range(2))
    one = torch.ones((), device=bench.device)
    columns = right.t()  # the second matrix has to lie by columns
    multiply: Any = partial(torch._scaled_mm, left, columns, one, one, out_dtype=BF16)
    return 2.0 * size**3 / seconds(bench, [partial(multiply, use_fast_accum=bench.cuda)] * 9)


def nvidia_smi(bench: Bench) -> None:
    query = "driver_version,clocks.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    bench.add(Fact(query, subprocess.check_output(command, text=True, timeout=10).strip()))


def check_case(bench: Bench, case: Case, numbers: Sequence[int]) -> None:
    experts = make(bench, case)
    for tokens in numbers:
        bench.attempt(f"check {case}, T={tokens}", 5, check_tokens, case, experts, tokens)
    if case.name == SMALL.name:
        for part in "EP halves", "TP halves":
            bench.attempt(f"check {case}, {part}", 5, check_halves, case, experts, part)
        bench.attempt(f"check {case}, graph", 5, check_graph, case, experts)


def check_tokens(bench: Bench, case: Case, experts: ExpertWeights, tokens: int) -> None:
    (batch,) = make_batches(bench, case, tokens, 1)
    what = "whole"
    if case.name == LARGE.name:
        what = "last experts"
        batch = batch._replace(ids=case.experts - 1 - batch.ids.argsort(-1))
    wanted = [expected(bench, experts, batch)]
    if case.block:
        wanted.append(exact(experts, batch, LIMIT_FP8_EXACT))
    layouts = {case: experts}
    if case.name == SMALL.name and not case.block:
        w13, w2 = (weight.mT.contiguous().mT for weight in (experts.w13, experts.w2))
        layouts[case._replace(transposed=True)] = replace(experts, w13=w13, w2=w2)
    for laid, weights in layouts.items():
        torch.full_like(batch.hidden, torch.nan)  # the output gets this memory: nothing right in it
        out = bench.own(weights)(batch)
        for want in wanted:
            add_check(bench, laid, what, tokens, off(out, want.value), want)


def add_check(
    bench: Bench, case: Case, what: str, tokens: int, error: float, want: Expected
) -> None:
    _, reference, limit = want
    bench.add(Check(str(case), what, tokens, reference, error, limit, error <= limit))


def check_halves(bench: Bench, case: Case, experts: ExpertWeights, what: str) -> None:
    """The sums over expert- or tensor-parallel halves are the whole."""
    (batch,) = make_batches(bench, case, 17, 1)
    want = expected(bench, experts, batch)
    axis, count = (0, case.experts // 2) if what == "EP halves" else (2, 0)

    def half(tensor: Tensor | None, rank: int) -> Any:
        return None if tensor is None else tensor.chunk(2, axis)[rank].contiguous()

    total = torch.zeros_like(want.value)
    for rank in range(2):
        part = replace(
            experts,  # w13 as [E, 2, I, H]: half the rows of gate, and of up
            w13=half(experts.w13.unflatten(1, (2, -1)), rank).flatten(1, 2),
            w2=half(experts.w2, rank),
            w13_scale=half(experts.w13_scale, rank),
            w2_scale=half(experts.w2_scale, rank),
            first_expert=rank * count,
        )
        total += bench.own(part)(batch)
    add_check(bench, case, what, 17, off(total, want.value), want)


def check_graph(bench: Bench, case: Case, experts: ExpertWeights) -> None:
    """A graph gives the bits of the call, again and again, and follows another routing."""
    first, second = make_batches(bench, case, 17, 2)
    held = Batch(*(tensor.clone() for tensor in first))
    eager = bench.own(experts)(held)
    graph = Graph(bench, [partial(bench.own(experts), held)])
    for what in "graph", "graph again":
        graph.replay()
        error = 0.0 if torch.equal(graph.outputs[0], eager) else inf
        add_check(bench, case, what, 17, error, Expected(eager, "bits of the call", 0.0))
    for tensor, other in zip(held, second, strict=True):
        tensor.copy_(other)
    graph.replay()
    want = expected(bench, experts, second)
    add_check(bench, case, "other routing", 17, off(graph.outputs[0], want.value), want)


def time_case(bench: Bench, case: Case) -> None:
    """One layer at all numbers of tokens; no peer takes FP8 in blocks."""
    gc.collect()  # the layer before, which a module of transformers may hold
    experts = make(bench, case)
    rivals: dict[str, Implementation | None] = {"own": bench.own(experts)}
    if not case.block:
        rivals["torch"] = bench.implementation(experts, "grouped")
        what = f"transformers on {case}"
        rivals["transformers"] = bench.attempt(what, 8, transformers_experts, case, experts)
    for tokens in bench.tokens:
        batches = make_batches(bench, case, tokens, ROUTINGS)
        what = f"on {case}, T={tokens}"
        want = bench.attempt(f"reference {what}", 8, expected, experts, batches[0])
        for name, run in rivals.items():
            if run is not None:
                row = floor(bench, case, experts, batches, name)
                calls = [partial(run, batch) for batch in batches]
                bench.attempt(f"{name} {what}", 4, time_calls, row, calls, want)


def transformers_experts(bench: Bench, case: Case, experts: ExpertWeights) -> Implementation:
    """transformers' module around the same tensors; it takes the router's weights in BF16."""
    package, prefix = case.peer.split(".")
    module = import_module(f"transformers.models.{package}.modeling_{package}")
    name = f"{prefix.removesuffix('Text')}TextConfig"
    settings = getattr(import_module("transformers"), name)(
        hidden_size=case.hidden, moe_intermediate_size=case.inner, num_experts=case.experts
    )
    settings._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        theirs = getattr(module, f"{prefix}Experts")(settings).requires_grad_(False)
    state = {"gate_up_proj": experts.w13, "down_proj": experts.w2}
    theirs.load_state_dict(state, strict=True, assign=True)
    return lambda batch: theirs(batch.hidden, batch.ids, batch.weights.to(BF16))


def floor(
    bench: Bench, case: Case, experts: ExpertWeights, batches: list[Batch], name: str
) -> Timing:
    """A row with what is known before the clock runs, from the number of experts really hit."""
    tokens, pairs = len(batches[0].ids), batches[0].ids.numel()
    distinct = mean(len(batch.ids.unique()) for batch in batches)
    stored = (experts.w13, experts.w2, experts.w13_scale, experts.w2_scale)
    expert = sum(tensor.nbytes for tensor in stored if tensor is not None) / case.experts
    size = round(distinct * expert) + 4 * tokens * case.hidden
    size += 4 * pairs * (case.inner + case.hidden)
    flop = 6 * pairs * case.hidden * case.inner
    reading = size / bench.rates.bytes_per_second
    rate = bench.fp8_rate if case.block else bench.rates.flop_per_second
    compute = flop / rate if rate else 0
    bound = "memory" if reading >= compute else "compute"
    bound = bound if rate else "memory, no FP8 rate"
    least = max(reading, compute) * 1e6
    return Timing(str(case), name, tokens, distinct, size, flop, least, bound)


def time_calls(
    bench: Bench, row: Timing, calls: list[Callable[[], Tensor]], want: Expected | None
) -> None:
    """Add the row with its times, and the error of what the timed calls gave."""
    outputs = [calls[0]()]
    eager = seconds(bench, calls[:2] + calls * -(-bench.repeats // len(calls)), flush=True)
    replayed, note = None, "" if want else "UNCHECKED "
    try:
        graph = Graph(bench, calls)
        replayed = seconds(bench, [graph.replay] * (2 + bench.repeats)) / len(calls)
        outputs.append(graph.outputs[0])
    except RuntimeError as problem:
        note += f"no graph: {str(problem).splitlines()[0][:80]}"
    error = ok = None
    if want:
        error = max(off(out, want.value) for out in outputs)
        ok = error <= (want.limit if row.implementation == "own" else LIMIT_PEER)
    row = replace(row, rel_l2=error, ok=ok, eager_us=eager * 1e6, note=note)
    best = replayed or eager
    row = replace(row, tb_per_s=row.bytes / best / 1e12, tflop_per_s=row.flop / best / 1e12)
    if replayed:
        share = row.floor_us / replayed / 1e6
        note += "SUSPECT: faster than the floor " if share > 1.15 else ""
        row = replace(row, graph_us=replayed * 1e6, of_floor=share, note=note)
    bench.add(row)


# --- loading --------------------------------------------------------------------------------------


def load_rates(bench: Bench, directory: Path | None) -> None:
    """A whole small model of real layers as one stage, from disk and from the page cache."""
    host = torch.ones(1 << (30 if bench.cuda else 20), dtype=torch.uint8)
    host = host.pin_memory() if bench.cuda else host
    target = torch.empty_like(host, device=bench.device)
    copy = seconds(bench, [lambda: target.copy_(host, non_blocking=True)] * 7)
    bench.add(Fact("copy from pinned memory, GB/s", len(host) / copy / 1e9))
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory) as work:
        source, out = Path(work, "source"), Path(work, "out")
        if bench.cuda:
            write_checkpoint(source, gb=3)
        else:
            source.mkdir()
            tiny.write_shards(source, tiny.checkpoint(tiny.Dims()))
            tiny.write_json(source / "config.json", tiny.config(tiny.Dims()))
            tiny.write_side_files(source)
        split(build_plan(open_checkpoint(source), pp_size=1), out, checksums=False)
        for state in "cold", "warm":
            load(bench, state, list(out.rglob("*.safetensors")))


def load(bench: Bench, state: str, files: list[Path]) -> None:
    for file in files if state == "cold" else ():
        with open(file, "rb") as opened:  # out of the page cache; nobody else's files leave it
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = None
    with suppress(OSError):  # not every system can make what is held now the peak
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmHWM")
    start = time.perf_counter()
    load_stage(files[0].parent, device=bench.device, mmap=False)
    if bench.cuda:
        torch.cuda.synchronize()
    duration = time.perf_counter() - start
    size = sum(file.stat().st_size for file in files)
    note = f"{size / 1e9:.3f} GB in {duration:.3f} s"
    bench.add(Fact(f"load_stage, {state}, GB/s", size / duration / 1e9, note))
    peak = (memory("VmHWM") - before) / 1e6 if before is not None else None
    note = "" if peak is not None else "the system does not tell"
    bench.add(Fact(f"peak host memory that added, MB, {state}", peak, note))


def memory(name: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


# --- tables and verdicts --------------------------------------------------------------------------


TARGETS: tuple[tuple[str, float, Sequence[int]], ...] = (
    ("floor / graph replay at least 0.60 at 1 to 64 tokens", 0.60, TOKENS[:3]),
    ("floor / graph replay at least 0.50 from 4096 tokens on", 0.50, TOKENS[4:]),
    ("time of the best peer / own at least 1, by graph and eager", 1.00, TOKENS),
)


def score(needed: float, own: Timing, peers: list[Timing]) -> float | None:
    """What is compared with the number needed; None where there is nothing to compare."""
    if not own.ok:
        return 0.0 if own.ok is False else None
    if needed < 1:  # without an FP8 rate, the floor is known where it is that of memory alone
        return None if own.tokens > 64 and "no FP8 rate" in own.bound else own.of_floor
    if own.graph_us is None or own.eager_us is None:
        return None
    ratios = [peer.graph_us / own.graph_us for peer in peers if peer.ok and peer.graph_us]
    ratios += [peer.eager_us / own.eager_us for peer in peers if peer.ok and peer.eager_us]
    return min(ratios, default=None)


def verdict(bench: Bench, text: str, needed: float, numbers: Sequence[int]) -> None:
    """Print whether a target is met, missed or not run, and where."""
    places: dict[str, list[str]] = {"missed": [], "not run": [], "met": []}
    timings = [row for row in bench.rows if isinstance(row, Timing)]
    for case in map(bench.sized, TIMED):
        for tokens in numbers if needed < 1 or not case.block else ():  # FP8 has no peer
            rows = [row for row in timings if (row.case, row.tokens) == (str(case), tokens)]
            own = [row for row in rows if row.implementation == "own"]
            peers = [row for row in rows if row.implementation != "own"]
            found = score(needed, own[0], peers) if own else None
            state = "not run" if found is None else "met" if found >= needed else "missed"
            places[state].append(f"{case} T={tokens} {'' if found is None else f'{found:.2f}'}")
    state = next(state for state in places if places[state]) if bench.cuda else "not run (dry)"
    print(f"\n{text}: {state}")
    for state, where in places.items():
        print(f"  {state}, {len(where)}: {'; '.join(where)}")


def show(bench: Bench, kind: type[Row]) -> None:
    """Print the rows of one kind as a table."""
    rows = [asdict(row) for row in bench.rows if isinstance(row, kind)]
    if rows:
        print(f"\n{kind.__name__}\n\n| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
    for row in rows:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        print(f"| {' | '.join(cells)} |")


def summary(bench: Bench) -> bool:
    """Print tables and verdicts; whether there are results, none wrong, and nothing failed."""
    for kind in Fact, Check, Timing:
        show(bench, kind)
    for target in TARGETS:
        verdict(bench, *target)
    results = [row.ok for row in bench.rows if isinstance(row, Check | Timing)]
    wrong, right = results.count(False), results.count(True)
    failed = [
        row.what
        for row in bench.rows
        if isinstance(row, Fact) and row.value is None and row.note != NO_TIME
        if row.what.startswith(("check", "own", "reference", "load", "the rest"))
    ]
    print(f"\nresults compared: {right + wrong}, wrong: {wrong}, failed: {'; '.join(failed) or 0}")
    return right > 0 and not wrong and not failed


def run(bench: Bench, directory: Path | None) -> None:
    """Everything, in the order of its weight, unless the device is lost."""
    small, few = (1, 8, 17, 64, 512), (1, 17, 512)
    checks = (SMALL, small), (fp8(SMALL), small), (VISION, few), (fp8(VISION), few)
    try:
        measure_machine(bench)
        for case, tokens in (*checks, (LARGE, few), (fp8(LARGE), few)):
            bench.attempt(f"check {case}", 8, check_case, bench.sized(case), tokens)
        for case in TIMED:
            if case == VISION:  # before the largest layers
                bench.attempt("loading a stage", 45, load_rates, directory)
            bench.attempt(f"times of {case}", 8, time_case, bench.sized(case))
    except Exception as error:  # noqa: BLE001
        bench.add(Fact("the rest", None, f"the device was lost: {error!r}"[:300]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the expert kernels on a GPU.")
    parser.add_argument("--out", type=Path, help="file for the JSON lines (default: stdout)")
    parser.add_argument(
        "--seconds", type=float, default=270, help="begin nothing after (default: 270)"
    )
    parser.add_argument("--dir", type=Path, help="where to write 6 GB for the loading part")
    parser.add_argument("--backend", choices=BACKENDS[1:], help="own kernels (default: triton)")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --dry runs on the CPU")
    device = torch.device("cpu") if given.dry else torch.device("cuda", torch.cuda.current_device())
    deadline = time.monotonic() + given.seconds
    torch.set_grad_enabled(False)
    if given.dry:
        torch.set_num_threads(1)  # for toys, more threads mostly wait for each other
    with open(given.out, "w") if given.out else os.fdopen(os.dup(1), "w") as out:
        backend: Backend = given.backend or ("reference" if given.dry else "triton")
        bench = Bench(device, backend, out, deadline)
        run(bench, given.dir)
        sys.exit(not summary(bench))


if __name__ == "__main__":
    main()
