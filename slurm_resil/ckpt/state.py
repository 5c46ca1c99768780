"""Training state to flat items (tensors, arrays) and plain values (JSON). No pickle; what cannot be stored is refused.

The values mirror the tree of the state, with a reference in the place of each tensor. Tensors that are the same memory
(tied weights) are one item, to which several places refer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from slurm_resil.ckpt import dtypes, plain, sharding
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.rng import RngState
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout
from slurm_resil.format.manifest import Extent

__all__ = ["Flat", "FlatItem", "RngState", "Sharded", "flatten"]

LARGE_BYTES = 4096  # bytes objects from this size on are items of their own
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class FlatItem:
    """One tensor or array to store; the fields are those of :class:`slurm_resil.format.manifest.Item`.

    Attributes:
        source: The memory itself, not a copy: a local tensor (any device, any strides) or an array.
    """

    name: str
    source: torch.Tensor | Array
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
    """A state taken apart: ``items`` and, as JSON, everything else."""

    items: tuple[FlatItem, ...]
    values: Any

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)


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


def flatten(state: Mapping[str, object]) -> Flat:
    """Take a state apart. Nothing is copied, and nothing is changed.

    Args:
        state: Modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, generators, tensors, arrays,
            plain values; in dicts, lists, tuples and dataclasses of any depth.

    Raises:
        StateError: Something in it cannot be stored; names its path.
    """
    flattener = _Flattener(parameter_paths(state))
    of = plain.pairs(state.items(), (), flattener.encode)
    return Flat(items=tuple(flattener.items), values={"$": "dict", "of": of})


def unwrap(module: nn.Module) -> nn.Module:
    """Take off wrappers that only change names: DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def module_entries(module: nn.Module, path: Path) -> dict[str, object]:
    """Entries of a module's state dict: its own parameters and buffers, not copies.

    Raises:
        StateError: It cannot give one.
    """
    if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
        raise StateError(f"{where(path)}: FSDP1 modules cannot be stored", mend="use fully_shard (FSDP2)")
    try:
        return dict(unwrap(module).state_dict(keep_vars=True))
    except Exception as error:
        raise StateError(f"{where(path)}: state_dict() failed: {error!r}") from error


def parameter_paths(state: Mapping[str, object]) -> dict[int, Path]:
    """Path of each parameter of each module in a state, by identity; the first name of a shared one counts."""
    found: dict[int, Path] = {}
    stack: list[tuple[object, Path]] = [(state, ())]
    seen: set[int] = set()
    while stack:
        value, path = stack.pop()
        if isinstance(value, nn.Module):
            for name, parameter in unwrap(value).named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), (*path, name))
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
    names, count = [], 0
    for group in optimizer.param_groups:
        row = []
        for parameter in group["params"]:
            row.append(paths.get(id(parameter), (f"#{count}",)))
            count += 1
        names.append(row)
    return names


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
    return (str(value.device), value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.is_conj())


def check_tensor(tensor: torch.Tensor, path: Path) -> None:
    """Refuse tensors that have no bytes of their own.

    Raises:
        StateError: Sparse, quantised, nested, on the meta device, or of a class with its own memory.
    """
    what = ""
    if tensor.is_meta:
        what = "a tensor on the meta device has no data"
    elif tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        what = f"a {tensor.layout} {'quantised ' if tensor.is_quantized else ''}tensor cannot be stored"
    elif not isinstance(tensor, DTensor) and (
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_lazy(tensor)
    ):
        what = f"a {plain.class_name(type(tensor))} cannot be stored"
    if what:
        raise StateError(f"{where(path)}: {what}", mend="convert it to an ordinary tensor", state_path=where(path))


@dataclass
class _Flattener:
    parameters: Mapping[int, Path]
    items: list[FlatItem] = field(default_factory=list)
    names: dict[object, str] = field(default_factory=dict)  # memory -> item that has it
    taken: set[str] = field(default_factory=set)
    open: list[int] = field(default_factory=list)  # containers that are being walked through
    given: str = ""  # class whose state_dict() gave what is being walked through

    def encode(self, value: object, path: Path) -> Any:
        """Encode anything."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if isinstance(value, np.ndarray):
            return self.array(value, path)
        if value is None or type(value) in (bool, int, float, str):
            return plain.encode(value, path, self.encode)
        if isinstance(value, bytes) and len(value) >= LARGE_BYTES:
            source = np.frombuffer(value, np.uint8)
            return {"$": "bytes", "item": self.add(path, source, "bytes", source.shape), "shape": [len(value)]}
        if id(value) in self.open or len(self.open) >= plain.DEEPEST:
            what = "contains itself" if id(value) in self.open else f"is nested more than {plain.DEEPEST} levels deep"
            raise StateError(f"{where(path[:20])}: the state {what}", state_path=where(path[:20]))
        self.open.append(id(value))
        try:
            found = self.special(value, path)
            return plain.encode(value, path, self.encode) if found is None else found
        finally:
            self.open.pop()

    def special(self, value: object, path: Path) -> Any:
        """Encode what is more than a plain value; None if it is not."""
        if self.given and (isinstance(value, nn.Module | Sharded) or is_stateful(value)):
            raise StateError(
                f"{where(path)}: state_dict() of {self.given} gave a {plain.class_name(type(value))}, not its state",
                mend="let it call state_dict() of what it holds",
                state_path=where(path),
            )
        if isinstance(value, nn.Module):
            return {"$": "module", "of": plain.pairs(module_entries(value, path).items(), path, self.encode)}
        if isinstance(value, torch.optim.Optimizer) and is_plain_optimizer(value):
            return self.optimizer(value, path)
        if isinstance(value, torch.Generator):
            of = self.encode(value.get_state(), path)
            return {"$": "torch.Generator", "device": value.device.type, "of": of}
        if isinstance(value, np.random.Generator):
            kind = type(value.bit_generator).__name__
            of = self.encode(value.bit_generator.state, path)
            return {"$": "numpy.random.Generator", "class": kind, "of": of}
        if isinstance(value, np.random.RandomState):
            return {"$": "numpy.random.RandomState", "of": self.encode(value.get_state(legacy=False), path)}
        if isinstance(value, random.Random) and type(value) is random.Random:
            return {"$": "random.Random", "of": self.encode(value.getstate(), path)}
        if isinstance(value, Sharded):
            return self.sharded(value, path)
        if is_stateful(value):
            return self.stateful(value, path)
        return None

    def stateful(self, value: object, path: Path) -> Any:
        """Encode what ``state_dict`` gives."""
        given = stateful_dict(value, path)
        self.given = type(value).__name__
        try:
            return {"$": "stateful", "class": plain.class_name(type(value)), "of": self.encode(given, path)}
        finally:
            self.given = ""

    def optimizer(self, value: torch.optim.Optimizer, path: Path) -> Any:
        """Encode an optimizer, its state by the names of the parameters."""
        names = optimizer_names(value, self.parameters)
        groups: list[Any] = []
        by_id: dict[int, Path] = {}
        for index, (group, row) in enumerate(zip(value.param_groups, names, strict=True)):
            by_id.update({id(p): name for p, name in zip(group["params"], row, strict=True)})
            others = ((key, entry) for key, entry in group.items() if key != "params")
            of = plain.pairs(others, (*path, "groups", str(index)), self.encode)
            groups.append({"params": [layout.join(*name) for name in row], "of": of})
        state: list[Any] = []
        rest: list[Any] = []
        for key, entry in dict[Any, Any](value.state).items():
            name = by_id.get(id(key))
            if name is not None:
                at = (*path, "state", *name)
                state.append([layout.join(*name), plain.pairs(entry.items(), at, self.encode)])
            elif isinstance(key, torch.Tensor):
                raise StateError(f"{where(path)}: state of a parameter that is in no group", state_path=where(path))
            else:
                at = (*path, "other")
                rest.append([plain.encode_key(key, at), self.encode(entry, (*at, key))])
        return {"$": "optimizer", "class": type(value).__name__, "groups": groups, "state": state, "other": rest}

    def tensor(self, value: torch.Tensor, path: Path) -> Any:
        """Encode a tensor: add an item, or refer to the one that has the same memory."""
        check_tensor(value, path)
        part = sharding.part_of(value, where(path))
        local = compact(part.local) if part.whole else part.local
        shape = tuple(local.shape) if part.whole else part.global_shape
        node: dict[str, Any] = {"$": "tensor", "dtype": dtypes.torch_name(value.dtype, where(path)), "shape": shape}
        if part.whole and shape != tuple(value.shape):
            node["expanded"] = tuple(value.shape)
        if not part.whole:
            node["sharded"] = True
        if value.device.type != "cpu":
            node["device"] = value.device.type
        sharing = "plain" if part.whole else "sharded"
        name = self.add(path, local, node["dtype"], tuple(local.shape), sharing, shape, part.extents)
        return {**node, "shape": list(shape), **_listed(node, "expanded"), "item": name}

    def sharded(self, value: Sharded, path: Path) -> Any:
        """Encode what the user says is a part of a global tensor."""
        check_tensor(value.tensor, path)
        local, shape = value.tensor.detach(), tuple(value.global_shape)
        covered = sum(int(np.prod(extent.shape)) for extent in value.extents)
        for extent in value.extents:
            for at, size, limit in ((extent.local, extent.shape, local.shape), (extent.start, extent.shape, shape)):
                bad = any(a < 0 or n < 0 or a + n > end for a, n, end in zip(at, size, limit, strict=False))
                if bad or not len(at) == len(size) == len(limit):
                    raise StateError(f"{where(path)}: {extent} does not fit {tuple(local.shape)} of {shape}")
        if covered != local.numel():
            raise StateError(f"{where(path)}: the extents cover {covered} of {local.numel()} elements")
        dtype = dtypes.torch_name(local.dtype, where(path))
        name = self.add(path, local, dtype, tuple(local.shape), "sharded", shape, tuple(value.extents))
        of = {"$": "tensor", "dtype": dtype, "shape": list(shape), "sharded": True, "item": name}
        return {"$": "sharded", "of": of}

    def array(self, value: Array, path: Path) -> Any:
        """Encode a numpy array."""
        if type(value) is not np.ndarray:
            raise StateError(
                f"{where(path)}: a {plain.class_name(type(value))} cannot be stored", mend="use an ndarray"
            )
        dtype = dtypes.numpy_name(value.dtype, where(path))
        node: dict[str, Any] = {"$": "ndarray", "dtype": dtype, "shape": list(value.shape)}
        if (fields := dtypes.fields_of(value.dtype)) is not None:
            node["fields"] = fields
        return {**node, "item": self.add(path, value, dtype, value.shape)}

    def add(
        self,
        path: Path,
        source: torch.Tensor | Array,
        dtype: str,
        shape: tuple[int, ...],
        sharing: str = "plain",
        global_shape: tuple[int, ...] = (),
        extents: tuple[Extent, ...] = (),
    ) -> str:
        """Add an item unless its memory is one already; returns the name."""
        memory = memory_key(source)
        key = None if memory is None else (memory, sharing, global_shape, extents)
        if key is not None and key in self.names:
            return self.names[key]
        name = layout.join(*path)
        if name in self.taken:
            name = next(new for n in range(2, 1 << 30) if (new := f"{name}~{n}") not in self.taken)
        self.taken.add(name)
        if key is not None:
            self.names[key] = name
        self.items.append(
            FlatItem(
                name=name,
                source=source,
                dtype=dtype,
                shape=shape,
                sharing=sharing,
                global_shape=global_shape or shape,
                extents=extents,
            )
        )
        return name


def _listed(node: dict[str, Any], key: str) -> dict[str, Any]:
    return {key: list(node[key])} if key in node else {}
