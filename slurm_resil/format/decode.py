"""Stored elements as numpy has them, without torch: to look at them, not to train with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slurm_resil.core.errors import UsageError
from slurm_resil.format import layout

Array = np.ndarray[Any, Any]
_BFLOAT16 = "torch.bfloat16"


def decode(dtype: str, raw: Array) -> Array:
    """Make numbers of stored bytes.

    Args:
        dtype: As in the manifest.
        raw: Bytes, uint8, contiguous, a multiple of the element's size.

    Returns:
        One-dimensional. ``bfloat16`` and the 8-bit floats become float32 of the same values, ``complex32`` complex64;
        ``json`` and ``bytes`` stay bytes.

    Raises:
        UsageError: The type is not known.
    """
    layout.itemsize(dtype)
    if dtype in layout.BYTES_DTYPES:
        return raw
    if dtype == _BFLOAT16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in layout.CUSTOM_FLOATS or dtype == "torch.float8_e8m0fnu":
        return _table(dtype)[raw]
    if dtype == "torch.complex32":
        return raw.view("<f2").astype(np.float32).view(np.complex64)
    kind, _, name = dtype.partition(".")
    try:
        element = np.dtype(name) if kind == "numpy" else np.dtype(name).newbyteorder("<")
    except TypeError as error:
        raise UsageError(f"elements of {dtype} cannot be shown", dtype=dtype) from error
    numbers: Array = raw.view(element)
    return numbers


@functools.cache
def _table(dtype: str) -> Array:
    """Value of each of the 256 bytes."""
    codes = np.arange(256)
    if dtype == "torch.float8_e8m0fnu":
        powers: Array = np.exp2(codes - 127.0)
        powers[255] = np.nan
        return powers.astype(np.float32)
    _, _, _, exponent_bits, _, bits, bias = layout.CUSTOM_FLOATS[dtype]
    exponent, mantissa = codes >> bits & ((1 << exponent_bits) - 1), codes & ((1 << bits) - 1)
    size = np.where(exponent > 0, 1.0, 0.0) + mantissa / (1 << bits)
    values: Array = np.where(codes < 128, 1.0, -1.0) * size * np.exp2(np.maximum(exponent, 1) - float(bias))
    if dtype.endswith("fnuz"):
        values[128] = np.nan  # the only one; there is no infinity and no negative zero
    elif dtype.endswith("fn"):
        values[(codes & 127) == 127] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] > 0, np.nan, np.copysign(np.inf, values[top]))
    return values.astype(np.float32)
