"""Running the experts of one layer: one function, three backends."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from reshard.errors import UsageError, WeightsError, quoted
from reshard.runtime.experts import ExpertWeights
from reshard.runtime.fused.grouped import grouped_experts, grouped_refusal
from reshard.runtime.fused.reference import reference_experts

_log = logging.getLogger("reshard")

Backend = Literal["auto", "reference", "grouped", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "grouped", "triton")


def fused_experts(
    hidden: Tensor,
    experts: ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """What the routed experts make of each token: `sum_j weight_j * w2[id_j] (silu(gate) * up)`.

    hidden: `[T, H]`, in the dtype of the weights (of FP8 ones: bfloat16 or float16); float32 and
    float64 with the reference backend, too. topk_ids: `[T, k]`, int32 or int64, numbers of experts in
    the layer. topk_weights: `[T, k]`, float32 (or the dtype of `hidden`).

    Experts that are not here, under expert parallelism or for an id of no expert (-1), add nothing;
    the sum over all ranks is the whole. So it is with the parts of tensor parallelism.

    backend: `triton` (reshard's kernels, CUDA), `grouped` (torch's grouped matrix product), `reference` (one
    expert after the other, in float32 or float64). `auto` takes the first of these that can run
    here. On CUDA, `triton` never waits for the device, so a CUDA graph can capture it, and gives equal
    bits for equal inputs. FP8 weights: `triton` rounds what they are multiplied with to FP8, too, in
    groups of a block's columns, as these checkpoints are made for; `reference` does not.

    Returns `[T, H]` in the dtype of `hidden`. Raises `UsageError` for tensors that do not fit
    together, `WeightsError` where the backend cannot run these weights.
    """
    _check(hidden, experts, topk_ids, topk_weights)
    backend = choose_backend(hidden, experts, backend)
    if hidden.shape[0] == 0 or experts.num_local_experts == 0:
        return torch.zeros_like(hidden)
    hidden = hidden.contiguous()
    if backend == "triton":
        from reshard.runtime.fused.launch import triton_experts

        return triton_experts(hidden, experts, topk_ids, topk_weights.float())
    run = grouped_experts if backend == "grouped" else reference_experts
    return run(hidden, experts, topk_ids, topk_weights)


def choose_backend(hidden: Tensor, experts: ExpertWeights, backend: Backend) -> Backend:
    """The backend that runs: `backend`, or for `auto` the fastest that can.

    Raises `WeightsError` where the one that was asked for cannot.
    """
    require_backend(backend)
    if backend == "auto":
        without_triton = triton_refusal(hidden, experts)
        if without_triton is None:
            return "triton"
        without_grouped = grouped_refusal(hidden, experts)
        if without_grouped is None:
            return "grouped"
        _say_once(f"experts run one after the other: {without_triton}; {without_grouped}")
        return "reference"
    refusal = None
    if backend != "reference":
        refuse = triton_refusal if backend == "triton" else grouped_refusal
        refusal = refuse(hidden, experts)
    if refusal is not None:
        raise WeightsError(
            f"the {backend} backend cannot run these experts: {refusal}",
            hint="choose another backend, or auto",
        )
    return backend


def require_backend(backend: str) -> None:
    """Raise `UsageError` unless there is such a backend."""
    if backend not in BACKENDS:
        raise UsageError(f"backend {quoted(repr(backend))} is none of {', '.join(BACKENDS)}")


@cache
def _say_once(message: str) -> None:
    _log.warning("%s", message)


def triton_refusal(hidden: Tensor, experts: ExpertWeights) -> str | None:
    """Why reshard's kernels cannot run; None if they can."""
    if hidden.device.type != "cuda":
        return "the kernels need CUDA"
    if not _triton_is_installed():
        return "triton is not installed (pip install 'reshard[cuda]')"
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels do not take {hidden.dtype}"
    if experts.block is not None and experts.block[1] not in (16, 32, 64, 128, 256):
        return f"FP8 scales for {experts.block[1]} columns each are not for these kernels"
    if experts.block is None and hidden.dtype != experts.w13.dtype:
        return f"hidden states are {hidden.dtype}, weights {experts.w13.dtype}"
    needed = (8, 0) if experts.block is None else (8, 9)
    capability = torch.cuda.get_device_capability(hidden.device)
    if capability < needed:
        return f"compute capability {needed[0]}.{needed[1]} is needed, {capability} is here"
    return None


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def _check(hidden: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Raise `UsageError` unless the tensors fit together."""
    size = experts.hidden_size
    if hidden.dim() != 2 or hidden.shape[1] != size:
        raise UsageError(
            f"hidden states are {tuple(hidden.shape)}, the experts take [tokens, {size}]"
        )
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise UsageError(
            f"hidden states are {hidden.dtype}, which is none of bfloat16, float16, float32 and "
            "float64"
        )
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden.shape[0] or topk_ids.shape[1] == 0:
        raise UsageError(f"topk_ids are {tuple(topk_ids.shape)} for {hidden.shape[0]} tokens")
    if topk_ids.shape != topk_weights.shape:
        raise UsageError(
            f"topk_ids are {tuple(topk_ids.shape)}, topk_weights {tuple(topk_weights.shape)}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
        raise UsageError(
            f"topk_ids are {topk_ids.dtype} and topk_weights {topk_weights.dtype}; they must be int32 "
            "or int64, and floating-point"
        )
    devices = {t.device for t in (hidden, experts.w13, experts.w2, topk_ids, topk_weights)}
    if len(devices) > 1:
        raise UsageError(
            f"tensors are on different devices: {', '.join(sorted(map(str, devices)))}"
        )
