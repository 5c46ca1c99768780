"""Elements as numpy has them are those that torch has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slurm_resil.core.errors import UsageError
from slurm_resil.format import layout
from slurm_resil.format.decode import decode

PACKED = "torch.float4_e2m1fn_x2"  # an element is two numbers: there is no array of them of the same shape


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted({*layout.TORCH_DTYPES} - {PACKED}))
def test_every_torch_type_has_the_values_that_torch_gives_it(name: str) -> None:
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    size = layout.itemsize(name)
    raw = np.random.default_rng(3).integers(0, 256, 256 * size, np.uint8)
    if size <= 2:  # every value there is
        raw = np.arange(256**size, dtype=f"<u{size}").view(np.uint8)
    raw = raw & 1 if name == "torch.bool" else raw
    ours = decode(name, raw)
    theirs = torch.from_numpy(raw).view(dtype)
    if name.startswith(("torch.float8", "torch.bfloat16")):
        theirs = theirs.to(torch.float32)
    if name == "torch.complex32":
        theirs = torch.from_numpy(raw).view(torch.float16).to(torch.float32).view(torch.complex64)
    assert ours.shape == (len(raw) // size,)
    np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("name", ["<f8", ">i4", "|u1", "<c16", "<M8[s]", "<U3", "|S5", "|V6", "|b1"])
def test_numpy_types(name: str) -> None:
    raw = np.arange(math.lcm(np.dtype(name).itemsize, 1) * 4, dtype=np.uint8)
    if name == "<U3":
        raw = np.frombuffer("abcdef".encode("utf-32-le") * 2, np.uint8)
    raw = raw & 1 if name == "|b1" else raw
    ours = decode(f"numpy.{name}", raw)
    assert ours.dtype == np.dtype(name) and ours.tobytes() == raw.tobytes()


def test_what_is_no_type_is_refused() -> None:
    assert decode("json", np.frombuffer(b"{}", np.uint8)).tobytes() == b"{}"
    with pytest.raises(UsageError, match="cannot be shown"):
        decode(PACKED, np.zeros(8, np.uint8))
    for name in ("torch.float7", "numpy.<q", "float32", ""):
        with pytest.raises(UsageError, match="unknown dtype"):
            decode(name, np.zeros(8, np.uint8))
