"""A training state taken apart: items (tensors, arrays) and plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slurm_resil.ckpt.state import Array
from slurm_resil.format import layout
from slurm_resil.format.manifest import Extent


@dataclass(frozen=True, kw_only=True)
class FlatItem:
    """One tensor or array to store; the fields are those of :class:`slurm_resil.format.manifest.Item`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharing: str = "plain"
    global_shape: tuple[int, ...] = ()
    extents: tuple[Extent, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return layout.nbytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A state taken apart.

    Attributes:
        items: What is to be stored; the same object as in the save before if they are equal.
        sources: The memory of each item itself, not a copy: a local tensor (any device, any strides) or an array.
        values: Everything else, as JSON.
        segments: Parts of ``values`` that stay the same objects from save to save.
        origins: What is in the state of each item: the parameter, of which the source may be the local part.
        optimizers: Optimizers of the state whose ``step()`` is what changes their parameters and tensors.
    """

    items: tuple[FlatItem, ...]
    sources: tuple[torch.Tensor | Array, ...]
    values: Any
    segments: tuple[Any, ...] = ()
    origins: tuple[object, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)


def raw_bytes(source: torch.Tensor | Array) -> memoryview:
    """The bytes of a tensor or array in row-major order; a copy if its memory is not in that order, or not in reach."""
    if isinstance(source, np.ndarray):
        return memoryview(np.ascontiguousarray(source).reshape(-1).view(np.uint8).data)
    local = source.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(local.reshape(-1).view(torch.uint8).numpy().data)
