"""How fast a stage's MoE blocks run here, against what the device can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from reshard.errors import DeviceError, WeightsError
from reshard.runtime.fused import Backend, choose_backend
from reshard.runtime.moe import MoeBlock, route
from reshard.runtime.weights import StageWeights

_WARM_UP = 2
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device was measured to do in a second: bytes read and written, FLOP of a product."""

    bytes_per_second: float
    flop_per_second: float


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer's MoE block: median seconds, and the bytes and FLOP that it takes.

    distinct_experts: how many different ones the tokens went to. error: relative L2 distance from the
    reference backend, None where it was not asked for; error_limit: what it may be.
    """

    layer: int
    backend: Backend
    seconds: float
    bytes: int
    flop: int
    distinct_experts: int
    error: float | None
    error_limit: float

    def bound(self, rates: Rates) -> str:
        """What limits it at best: `memory` or `compute`."""
        memory = self.bytes / rates.bytes_per_second >= self.flop / rates.flop_per_second
        return "memory" if memory else "compute"

    def roofline(self, rates: Rates) -> float:
        """The fraction of the roofline that it reached: time at these rates over time taken."""
        least = max(self.bytes / rates.bytes_per_second, self.flop / rates.flop_per_second)
        return least / self.seconds

    @property
    def wrong(self) -> bool:
        """Whether it was compared with the reference, and differs too much, or is no number."""
        return self.error is not None and not self.error <= self.error_limit


def forward_document(
    stage: StageWeights,
    layers: Sequence[int],
    *,
    tokens: int,
    backend: Backend = "auto",
    check: bool = False,
) -> dict[str, Any]:
    """What `reshard forward` prints; docs/json.md describes the fields.

    Raises as `measure_layers` does, `WeightsError` for a stage without sparse layers, `DeviceError`
    where there is too little memory.
    """
    if not layers:
        raise WeightsError(
            f"stage {stage.stage} has no MoE layers: {stage.model.model_type}",
            hint="there are no experts to run in a dense model",
        )
    dtype = MoeBlock(stage, layers[0]).router.dtype
    try:
        rates = measure_rates(stage.device, dtype)
        times = measure_layers(stage, layers, tokens=tokens, backend=backend, check=check)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)):
            raise
        raise DeviceError(
            f"{stage.device} has too little memory left beside the stage to run {tokens} tokens",
            hint="run fewer tokens, or a stage with fewer layers",
        ) from error
    cuda = stage.device.type == "cuda"
    return {
        "model_type": stage.model.model_type,
        "stage": stage.stage,
        "pp_size": stage.pp_size,
        "device": torch.cuda.get_device_name(stage.device) if cuda else "cpu",
        "torch": torch.__version__,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(rates),
        "layers": [
            {
                **asdict(layer),
                "error": layer.error if layer.error is not None and isfinite(layer.error) else None,
                "error_limit": layer.error_limit if check else None,
                "bound": layer.bound(rates),
                "roofline": layer.roofline(rates),
                "ok": not layer.wrong,
            }
            for layer in times
        ],
        "ok": not any(layer.wrong for layer in times),
    }


def measure_layers(
    stage: StageWeights,
    layers: Sequence[int],
    *,
    tokens: int,
    backend: Backend = "auto",
    check: bool = False,
) -> list[LayerTime]:
    """Run the MoE blocks of `layers`, one after the other, on random hidden states of `tokens` tokens.

    All layers take turns, so that the weights of real ones are not in the caches. Raises
    `LayerNotHereError`; `WeightsError` where the backend cannot run them.
    """
    blocks = [MoeBlock(stage, layer, backend) for layer in layers]
    generator = torch.Generator(stage.device).manual_seed(0)
    calls = []
    for block in blocks:
        shape = tokens, block.router.shape[1]
        hidden = torch.randn(shape, generator=generator, device=stage.device)
        calls.append((block, hidden.to(block.router.dtype)))
    errors = [_error(stage, *call) if check else None for call in calls]
    times = _seconds(calls, stage.device)
    return [
        _layer_time(*call, seconds, error)
        for call, seconds, error in zip(calls, times, errors, strict=True)
    ]


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Copy a large tensor and multiply two large matrices of `dtype` (FP8 counts as bfloat16)."""
    cuda = device.type == "cuda"
    data = torch.empty((2 << 30) if cuda else (256 << 20), dtype=torch.uint8, device=device)
    data.random_(0, 256)
    target = torch.empty_like(data)
    size = 8192 if cuda else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copy = _median_seconds(lambda: target.copy_(data), device)
    product = _median_seconds(lambda: left @ right, device)
    return Rates(2 * data.numel() / copy, 2 * size**3 / product)


def _error(stage: StageWeights, block: MoeBlock, hidden: Tensor) -> float:
    """Relative L2 distance of the block's output from that of the reference backend."""
    expected = MoeBlock(stage, block.layer, "reference")(hidden).double()
    difference = float((block(hidden).double() - expected).norm())
    return difference / float(expected.norm()) if difference else 0.0


_LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3}
_LIMIT_BF16 = 2e-2
_LIMIT_FP8 = 1e-1
"""reshard's kernels round what FP8 weights are multiplied with to FP8, too: errors of 4 % are normal."""


def _layer_time(block: MoeBlock, hidden: Tensor, seconds: float, error: float | None) -> LayerTime:
    """What moves: weights of the experts that were hit, of router and shared expert; tokens in and
    out; what lies between the two products, written and read. Of this rank's experts only.
    """
    experts, shared = block.experts, block.shared_expert
    topk_ids, _ = route(hidden, block.router, block.top_k)
    last = experts.first_expert + experts.num_local_experts
    local = [i for i in topk_ids.flatten().tolist() if experts.first_expert <= i < last]
    slots, distinct = len(local), len(set(local))
    tensors = (experts.w13, experts.w2, experts.w13_scale, experts.w2_scale)
    held = sum(t.nbytes for t in tensors if t is not None)
    nbytes = held * distinct // experts.num_local_experts + block.router.nbytes
    width, inner = experts.hidden_size, experts.intermediate_size
    nbytes += 2 * hidden.nbytes + 2 * slots * (inner + width) * hidden.element_size()
    flop = 6 * slots * width * inner + 2 * hidden.numel() * block.router.shape[0]
    if shared is not None:
        nbytes += shared.gate_proj.nbytes + shared.up_proj.nbytes + shared.down_proj.nbytes
        flop += 6 * hidden.numel() * shared.gate_proj.shape[0]
    fp8 = experts.block is not None
    return LayerTime(
        layer=block.layer,
        backend=choose_backend(hidden, experts, block.backend),
        seconds=seconds,
        bytes=nbytes,
        flop=flop,
        distinct_experts=distinct,
        error=error,
        error_limit=_LIMIT_FP8 if fp8 else _LIMITS.get(hidden.dtype, _LIMIT_BF16),
    )


def _seconds(calls: Sequence[tuple[MoeBlock, Tensor]], device: torch.device) -> list[float]:
    """The median time of each call, all of them being made in turn."""
    passes = []
    for _ in range(_WARM_UP + _REPEATS):
        passes.append([_elapsed(partial(block, hidden), device) for block, hidden in calls])
    return [median(times) for times in zip(*passes[_WARM_UP:], strict=True)]


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    return median([_elapsed(call, device) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:])


def _elapsed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that one call takes on the device."""
    if device.type == "cuda":
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
