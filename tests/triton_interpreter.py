"""Triton's interpreter, corrected: it multiplies bfloat16 as integers, and rounds towards zero.

GPUs round to the nearest, ties to even. Private names of triton.runtime.interpreter are replaced,
the same in triton 3.6 and 3.9; `tests/test_triton.py` begins by proving that it helps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot


def _rounded(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
    """float32 to bfloat16 or FP8 as torch converts it; everything else as it was."""
    if given != tl.float32 or wanted not in _TORCH:
        return _convert(data, given, wanted, mode)
    tensor = torch.from_numpy(np.ascontiguousarray(data)).to(_TORCH[wanted])
    raw = tensor.view(torch.int16 if wanted == tl.bfloat16 else torch.uint8).numpy()
    return raw.view(np.uint16) if wanted == tl.bfloat16 else raw


def _widened_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """Products of bfloat16 in float32, as matrix instructions add them up."""

    def wide(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    return _dot(self, wide(a), wide(b), d, precision, imprecise)


def correct_interpreter() -> None:
    """Replace what is wrong in it, once."""
    interpreter._convert_float = _rounded
    interpreter.InterpreterBuilder.create_dot = _widened_dot
