"""safetensors dtypes in torch, and bytes seen as tensors of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from reshard.errors import WeightsError, quoted
from reshard.header import DTYPE_BITS

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32,
    "U64": torch.uint64, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
"""As the safetensors library maps them. F4 has two elements in one of torch's."""


def require_torch_dtype(dtype: str, shape: tuple[int, ...], name: str) -> None:
    """Raise `WeightsError` unless torch can hold the tensor `name`, of this dtype and shape."""
    odd = dtype == "F4" and shape[-1] % 2 == 1
    vast = prod(max(1, size) for size in shape) >= 2**59  # beside a 0, a header may say anything
    if dtype not in TORCH_DTYPES or odd or vast:
        what = quoted(dtype)
        if odd or vast:
            what += f", shape {quoted(str([*shape]))}"
        raise WeightsError(
            f"tensor {quoted(name)} has dtype {what}, which torch cannot hold",
            hint="the stage can be split, merged and served by engines that know it",
        )


def item_bytes(dtype: str) -> int:
    """How many bytes the start of a tensor of this dtype must be a multiple of."""
    return max(1, DTYPE_BITS[dtype] // 8)


def as_tensor(data: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The bytes `data` (uint8, one axis) as a tensor: a view of them.

    A 4-bit tensor `[..., n]` becomes one of pairs, `[..., n / 2]`.
    """
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    return data.view(TORCH_DTYPES[dtype]).view(shape)
