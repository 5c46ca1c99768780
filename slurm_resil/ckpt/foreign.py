"""Checkpoints of other programs, opened as one tree: a file of torch.save, a DCP directory, or safetensors.

The tensors in the tree are on the meta device and read one by one when they are asked for, except those of a file of
torch.save, which lie in a mapping of it. Nothing is ever unpickled that could run code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from slurm_resil.ckpt import dtypes, foreigndcp
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.format import safetensors

Kind = Literal["torch", "dcp", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class Later:
    """A value of the tree that is read only if it is wanted."""

    read: Callable[[], Any]


@dataclass(kw_only=True)
class Foreign:
    """A checkpoint of another program.

    Attributes:
        path: Where it is.
        kind: Its format.
        tree: Dicts and lists of tensors and plain values, or of :class:`Later`.
    """

    path: str
    kind: Kind
    tree: dict[Any, Any]
    _loaders: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)  # or another tensor would get the same id

    def promise(self, dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Make the tensor that stands for one that is read later."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._loaders[id(made)] = load
        self._kept.append(made)
        return made

    def read(self, tensor: Any) -> Any:
        """Read what a tensor of the tree stands for; anything else is given back.

        Raises:
            DataError: It is damaged.
        """
        load = self._loaders.get(id(tensor))
        return tensor if load is None else load()


def open_foreign(path: str) -> Foreign:
    """Find out what lies at a path, and open it.

    Raises:
        UsageError: There is nothing, or nothing that can be read here.
        DataError: It is damaged, or holds what only its own code could read.
    """
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist", mend="name a DCP directory, a file of torch.save or safetensors")
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, foreigndcp.METADATA)):
            return _dcp(path)
        if any(name.endswith((safetensors.ENDING, safetensors.INDEX_ENDING)) for name in os.listdir(path)):
            return _safetensors(path)
        raise UsageError(
            f"{path} holds no checkpoint: neither {foreigndcp.METADATA} of torch.distributed.checkpoint nor "
            f"*{safetensors.ENDING}",
            mend="name the directory in which these lie",
        )
    if path.endswith((safetensors.ENDING, safetensors.ENDING + safetensors.INDEX_ENDING)):
        return _safetensors(path)
    return _torch(path)


def _torch(path: str) -> Foreign:
    with open(path, "rb") as file:
        archive = file.read(4) == b"PK\x03\x04"
        if archive:
            foreigndcp.checked_archive(file, path)
    # one that is no archive is of torch before 1.6, which cannot be mapped
    found = foreigndcp.load_plain(path, path, mmap=archive)
    if not isinstance(found, dict):
        raise UsageError(
            f"{path} holds a {type(found).__name__}, not a dict",
            mend="save a state_dict(), or a dict of such, as in torch.save({'model': model.state_dict()}, FILE)",
        )
    return Foreign(path=path, kind="torch", tree=found)


def _safetensors(path: str) -> Foreign:
    foreign = Foreign(path=path, kind="safetensors", tree={})
    for tensor in safetensors.read(path):
        if tensor.name in foreign.tree:
            raise DataError(f"{path} has two tensors named {tensor.name}", path=path)
        dtype = dtypes.torch_dtype(tensor.dtype, tensor.name)
        foreign.tree[tensor.name] = foreign.promise(dtype, tensor.shape, _reader(tensor, dtype))
    return foreign


def _reader(tensor: safetensors.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        data = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
        if data.size != tensor.nbytes:
            raise DataError(f"{tensor.file} is truncated: {tensor.name} is not all there", fault="truncated")
        return torch.from_numpy(data).view(dtype).reshape(tensor.shape)

    return read


def _dcp(path: str) -> Foreign:
    checkpoint = foreigndcp.Checkpoint(path)
    foreign = Foreign(path=path, kind="dcp", tree={})
    nested: dict[Any, Any] = {}
    for name, at in checkpoint.paths.items():
        if name in checkpoint.tensors:
            dtype, shape = checkpoint.tensors[name]
            value: Any = foreign.promise(dtype, shape, lambda name=name: checkpoint.tensor(name))  # type: ignore[misc]
        else:
            value = Later(read=lambda name=name: checkpoint.object(name))  # type: ignore[misc]
        _put(nested, at, value, name)
    foreign.tree = _listed(nested)
    return foreign


class _Numbered(dict[int, Any]):
    """A list that is being put together."""


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: object, name: str) -> None:
    for key, following in pairwise(path):
        inner = tree.setdefault(key, _Numbered() if isinstance(following, int) else {})
        if not isinstance(inner, dict):
            raise DataError(f"{name} lies below something that is a value itself")
        tree = inner
    tree[path[-1]] = value


def _listed(tree: Any) -> Any:
    if isinstance(tree, _Numbered):
        return [_listed(tree[index]) for index in sorted(tree)]
    return {key: _listed(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
