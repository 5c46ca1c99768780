"""Tensors into a file of torch's own, for programs that read nothing else. Nothing here is ever read back by us."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from slurm_resil.ckpt import dtypes
from slurm_resil.core.errors import StateError
from slurm_resil.format.decode import Array, decode


def save(file: BinaryIO, named: Iterable[tuple[str, str, Sequence[int], Array]]) -> None:
    """Write ``{name: tensor}`` with ``torch.save``; ``torch.load(weights_only=True)`` reads it.

    Args:
        file: Where to.
        named: Name, type as in the manifest, shape, and bytes (uint8, contiguous) of each. All are in memory at once.

    Raises:
        StateError: A type that torch does not have.
    """
    torch.save({name: _tensor(name, dtype, shape, raw) for name, dtype, shape, raw in named}, file)


def _tensor(name: str, dtype: str, shape: Sequence[int], raw: Array) -> torch.Tensor:
    if dtype.startswith("torch."):
        if raw.size == 0:  # one that is empty has no stride by which another type could be told
            return torch.empty(tuple(shape), dtype=dtypes.torch_dtype(dtype, name))
        return torch.from_numpy(raw).view(dtypes.torch_dtype(dtype, name)).reshape(tuple(shape))
    numbers: Any = decode(dtype, raw)
    try:
        return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False)).reshape(tuple(shape))
    except TypeError as error:
        raise StateError(f"{name}: torch has no {np.dtype(numbers.dtype)}", mend="leave it out with --only") from error
