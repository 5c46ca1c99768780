"""What the parts of a training state are: modules, optimizers, stateful objects, tensors; used by save and restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from slurm_resil.ckpt import names, plain
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.core.errors import StateError
from slurm_resil.format.manifest import Extent

Array = np.ndarray[Any, Any]


@dataclass(kw_only=True)
class Sharded:
    """A tensor that the user says is a part of a global one (ZeRO, expert parallelism, flat buffers of one's own).

    Attributes:
        tensor: The local part.
        global_shape: Shape of the whole.
        extents: Which boxes of the local tensor lie where in the whole; together they cover the local tensor.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    extents: tuple[Extent, ...]


def module_entries(module: nn.Module, path: Path) -> dict[str, object]:
    """Entries of a module's state dict: its own parameters and buffers, not copies; by names without wrappers.

    Raises:
        StateError: It cannot give one, or two entries have one name.
    """
    if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
        raise StateError(f"{where(path)}: FSDP1 modules cannot be stored", mend="use fully_shard (FSDP2)")
    inner = names.unwrap(module)
    try:
        entries = dict(inner.state_dict(keep_vars=True))
    except Exception as error:
        raise StateError(f"{where(path)}: state_dict() failed: {error!r}") from error
    if not names.marked(entries):
        return entries
    return {plain: entries[name] for plain, name in names.plain_names(inner, entries, path).items()}


def parameter_paths(state: Mapping[str, object]) -> dict[int, Path]:
    """Path of each parameter of each module in a state, by identity; the first name of a shared one counts."""
    found: dict[int, Path] = {}
    stack: list[tuple[object, Path]] = [(state, ())]
    seen: set[int] = set()
    while stack:
        value, path = stack.pop()
        if isinstance(value, nn.Module):
            inner = names.unwrap(value)
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), (*path, names.plain_name(inner, name)))
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                stack += [(entry, (*path, key)) for key, entry in reversed(list(value.items()))]
            elif isinstance(value, list | tuple):
                stack += [(entry, (*path, str(index))) for index, entry in reversed(list(enumerate(value)))]
            elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
                stack += [(getattr(value, name), (*path, name)) for name in value.__dataclass_fields__]
    return found


def is_stateful(value: object) -> bool:
    """Whether a value has ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps its state where torch's own do, so that it can be read and set by parameter name."""
    base = torch.optim.Optimizer
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (
        type(optimizer).state_dict is base.state_dict
        and type(optimizer).load_state_dict is base.load_state_dict
        and not any(getattr(optimizer, f"_optimizer_{name}_hooks", None) for name in hooks)
    )


def optimizer_names(optimizer: torch.optim.Optimizer, paths: Mapping[int, Path]) -> list[list[Path]]:
    """Path of every parameter, by group; one that no module of the state has is called by its place, ``#<n>``."""
    found, count = [], 0
    for group in optimizer.param_groups:
        row = []
        for parameter in group["params"]:
            row.append(paths.get(id(parameter), (f"#{count}",)))
            count += 1
        found.append(row)
    return found


def stateful_dict(value: Any, path: Path) -> object:
    """Call ``state_dict()`` of an object.

    Raises:
        StateError: It raised.
    """
    try:
        return value.state_dict()
    except Exception as error:
        raise StateError(f"{where(path)}: {type(value).__name__}.state_dict() failed: {error!r}") from error


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Take one element of each expanded dimension (stride 0)."""
    for dim in range(tensor.ndim):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def memory_key(value: torch.Tensor | Array) -> object:
    """What is equal for two views of exactly the same memory; None for empty ones."""
    if isinstance(value, np.ndarray):
        return (
            (value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str) if value.size else None
        )
    if value.numel() == 0:
        return None
    if value.is_meta:  # every address is 0 there
        place = (value.untyped_storage()._cdata, value.storage_offset())
        return (place, value.shape, value.stride(), value.dtype)
    shape, stride, dtype = value.shape, value.stride(), value.dtype
    return (value.device, value.data_ptr(), shape, stride, dtype, value.is_conj(), value.is_neg())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Local tensors of a tensor, a module, or containers of them."""
    if isinstance(value, torch.Tensor):
        yield value._local_tensor if isinstance(value, DTensor) else value
    elif isinstance(value, nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from tensors_in(tensor)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def check_tensor(tensor: torch.Tensor, path: Path, *, meta: bool = False) -> None:
    """Refuse tensors that have no bytes of their own.

    Args:
        tensor: It.
        path: Where it is.
        meta: Let those pass that are on the meta device.

    Raises:
        StateError: Sparse, quantised, nested, on the meta device, or of a class with its own memory.
    """
    what = ""
    if tensor.is_meta and not meta:
        what = "a tensor on the meta device has no data"
    elif tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantised " if tensor.is_quantized else "nested " if tensor.is_nested else ""
        what = f"a {tensor.layout} {kind}tensor of {tensor.dtype} cannot be stored"
    elif not isinstance(tensor, DTensor) and (
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_lazy(tensor)
    ):
        what = f"a {plain.class_name(type(tensor))} cannot be stored"
    if what:
        raise StateError(f"{where(path)}: {what}", mend="convert it to an ordinary tensor", state_path=where(path))
