"""Take a training state apart into items (tensors, arrays) and plain values (JSON); what cannot be stored is refused.

The values mirror the tree of the state, with a reference in the place of each tensor. Tensors that are the same memory
(tied weights) are one item, to which several places refer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from slurm_resil.ckpt import dtypes, plain, sharding, views
from slurm_resil.ckpt.flat import Flat, FlatItem
from slurm_resil.ckpt.memo import ChangedError, Memo, Segment, fingerprint
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.state import (
    Array,
    Sharded,
    check_tensor,
    compact,
    is_plain_optimizer,
    is_stateful,
    memory_key,
    module_entries,
    optimizer_names,
    parameter_paths,
    stateful_dict,
)
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout
from slurm_resil.format.manifest import Extent

LARGE_BYTES = 4096  # bytes objects from this size on are items of their own
FEWEST = 16  # tensors of a plain dict, for it to be a segment
_SCALARS = (type(None), bool, int, float, str)


def flatten(state: Mapping[str, object], memo: Memo | None = None, *, meta: bool = False) -> Flat:
    """Take a state apart. Nothing is copied, and nothing is changed.

    Args:
        state: Modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, generators, tensors, arrays,
            plain values; in dicts, lists, tuples and dataclasses of any depth.
        memo: What the calls before found out about this state; they are the faster for it.
        meta: Let tensors of the meta device pass, which have nothing to be saved yet: before a restore gives it.

    Raises:
        StateError: Something in it cannot be stored; names its path.
    """
    memo = memo or Memo()
    if memo.segments:
        try:
            return _walk(state, memo, replay=True, meta=meta)
        except ChangedError as error:
            memo.changed(error.key)
    return _walk(state, memo, replay=False, meta=meta)


def _walk(state: Mapping[str, object], memo: Memo, *, replay: bool, meta: bool) -> Flat:
    memo.begin(replay=replay)
    flattener = _Flattener(state, memo, meta)
    of = plain.pairs(state.items(), (), flattener.encode)
    views.mark(flattener.alone)
    return Flat(
        items=memo.end(tuple(flattener.items)),
        sources=tuple(flattener.sources),
        values={"$": "dict", "of": of},
        segments=memo.nodes,
        origins=tuple(flattener.origins),
        optimizers=tuple(flattener.optimizers),
    )


@dataclass
class _Flattener:
    state: Mapping[str, object]
    memo: Memo
    meta: bool  # tensors of that device may pass
    items: list[FlatItem] = field(default_factory=list)
    sources: list[torch.Tensor | Array] = field(default_factory=list)  # of the items
    origins: list[object] = field(default_factory=list)  # of the items: what is in the state
    names: dict[object, str] = field(default_factory=dict)  # memory -> item that has it
    taken: set[str] = field(default_factory=set)
    own: set[str] | None = None  # items that the segment which is being written down has added
    borrows: bool = False  # it refers to an item of another part
    open: list[int] = field(default_factory=list)  # containers that are being walked through
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    # tensors that may be made anew, and their nodes
    alone: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
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
            return {"$": "module", "of": self.module(value, path)}
        if type(value) is dict and len(value) >= FEWEST and not self.given:
            return self.dictionary(value, path)
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

    def segment(
        self,
        key: Hashable,
        keys: Sequence[object],
        tensors: Sequence[torch.Tensor],
        build: Callable[[], Any],
    ) -> Any:
        """Encode a part of the state as ``build`` does, or as it did the last time if nothing in it has changed.

        Args:
            key: Name of the part.
            keys: What else it depends on, all of it comparable.
            tensors: All tensors in it.
            build: Encodes it; looks at nothing else.
        """
        memo = self.memo
        if memo.replaying:
            if key not in memo.segments:
                raise ChangedError(key)
            known = memo.segments[key]
            if known is None:
                return build()
            found = known.sources(keys, tensors)
            if found is None or not self.names.keys().isdisjoint(known.names):
                raise ChangedError(key)
            self.items += known.items
            self.sources += found[0]
            self.origins += found[1]
            self.names.update(known.names)
            self.taken.update(item.name for item in known.items)
            return known.node
        first, named = len(self.items), len(self.names)
        self.own, self.borrows = set(), False
        try:
            node = build()
        finally:
            self.own = None
        memo.segments[key] = self.remember(key, keys, tensors, node, first, named)
        return node

    def remember(
        self, key: Hashable, keys: Sequence[object], tensors: Sequence[torch.Tensor], node: Any, first: int, named: int
    ) -> Segment | None:
        """Make a segment of what was added since; None if its tensors do not tell all about it."""
        if self.borrows or not self.memo.wanted(key):
            return None
        prints = [fingerprint(tensor) for tensor in tensors]
        numbers = {id(tensor): index for index, tensor in enumerate(tensors)}
        picks = [numbers.get(id(origin)) for origin in self.origins[first:]]
        if None in picks or None in prints:
            return None
        return Segment(
            keys=keys,
            prints=[entry for entry in prints if entry is not None],
            node=node,
            items=tuple(self.items[first:]),
            picks=tuple(pick for pick in picks if pick is not None),
            names=dict(islice(self.names.items(), named, None)),
        )

    def module(self, value: nn.Module, path: Path) -> Any:
        """Encode a module's state dict."""

        def build() -> Any:
            return plain.pairs(entries.items(), path, self.placed)

        entries = module_entries(value, path)
        tensors = [entry for entry in entries.values() if isinstance(entry, torch.Tensor)]
        key = ("module", path)
        if len(tensors) < len(entries):  # extra state
            self.memo.unsound(key)
            return build()
        node = self.segment(key, list(entries), tensors, build)
        if self.memo.segments[key] is None:
            self.memo.unsound(key)
        return node

    def dictionary(self, value: dict[Any, Any], path: Path) -> Any:
        """Encode a dict that may be one of many tensors."""
        tensors = [entry for entry in value.values() if isinstance(entry, torch.Tensor)]
        if len(tensors) < len(value) or not all(type(key) is str for key in value):
            return plain.encode(value, path, self.encode)
        key, memo = ("dict", path), self.memo
        known = memo.replaying and memo.segments.get(key) is not None
        if not known and not views.ordinary(tensors):
            memo.segments.setdefault(key, None)
            return plain.encode(value, path, self.encode)
        keys = [*value, any(tensor.requires_grad for tensor in tensors)]
        return self.segment(key, keys, tensors, lambda: plain.encode(value, path, self.placed))

    def optimizer(self, value: torch.optim.Optimizer, path: Path) -> Any:
        """Encode an optimizer, its state by the names of the parameters."""
        self.optimizers.append(value)
        parameters = [parameter for group in value.param_groups for parameter in group["params"]]
        sizes = [len(group["params"]) for group in value.param_groups]
        names = self.segment(("names", path), sizes, parameters, lambda: self.parameter_names(value))
        groups = []
        for index, (group, row) in enumerate(zip(value.param_groups, names, strict=True)):
            others = ((key, entry) for key, entry in group.items() if key != "params")
            groups.append({"params": row, "of": plain.pairs(others, (*path, "groups", str(index)), self.encode)})
        state, rest = dict[Any, Any](value.state), dict[Any, Any]()
        keys: list[object] = []
        tensors: list[torch.Tensor] = []
        simple = True
        for key in list(state):
            if not isinstance(key, torch.Tensor):
                rest[key] = state.pop(key)
                continue
            entries = state[key]
            keys.append((id(key), tuple(entries)))
            for entry in entries.values():
                if isinstance(entry, torch.Tensor):
                    tensors.append(entry)
                else:
                    simple = simple and type(entry) in _SCALARS
                    keys.append((type(entry), entry))

        def build() -> Any:
            return self.parameter_state(value, state, path)

        of = self.segment(("state", path), keys, tensors, build) if simple else build()
        other = []
        for key, entry in rest.items():
            at = (*path, "other")
            other.append([plain.encode_key(key, at), self.encode(entry, (*at, key))])
        return {"$": "optimizer", "class": type(value).__name__, "groups": groups, "state": of, "other": other}

    def parameter_names(self, value: torch.optim.Optimizer) -> list[list[str]]:
        """Names of the parameters, by group."""
        return [[layout.join(*name) for name in row] for row in optimizer_names(value, self.parameters)]

    def parameter_state(self, value: torch.optim.Optimizer, state: Mapping[Any, Any], path: Path) -> list[Any]:
        """Encode what an optimizer keeps for its parameters."""
        by_id: dict[int, Path] = {}
        for group, row in zip(value.param_groups, optimizer_names(value, self.parameters), strict=True):
            by_id.update({id(p): name for p, name in zip(group["params"], row, strict=True)})
        found = []
        for parameter, entry in state.items():
            name = by_id.get(id(parameter))
            if name is None:
                raise StateError(f"{where(path)}: state of a parameter that is in no group", state_path=where(path))
            found.append([layout.join(*name), plain.pairs(entry.items(), (*path, "state", *name), self.placed)])
        return found

    @cached_property
    def parameters(self) -> Mapping[int, Path]:
        """Path of every parameter of every module."""
        return parameter_paths(self.state)

    def placed(self, value: object, path: Path) -> Any:
        """Encode anything; a tensor is one that has its place in the state, and is not made anew by a restore."""
        return self.tensor(value, path, placed=True) if isinstance(value, torch.Tensor) else self.encode(value, path)

    def tensor(self, value: torch.Tensor, path: Path, *, placed: bool = False) -> Any:
        """Encode a tensor: add an item, or refer to the one that has the same memory."""
        check_tensor(value, path, meta=self.meta)
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
        origin = value if local is part.local else None  # None: what is stored is not just the tensor
        name = self.add(path, local, node["dtype"], tuple(local.shape), sharing, shape, part.extents, origin)
        node |= {"shape": list(shape), **_listed(node, "expanded"), "item": name}
        if not placed:
            views.describe(value, node, path, given=bool(self.given))
            if part.whole:
                self.alone.append((value, node))
        return node

    def sharded(self, value: Sharded, path: Path) -> Any:
        """Encode what the user says is a part of a global tensor."""
        check_tensor(value.tensor, path, meta=self.meta)
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
        if not value.flags.writeable:
            raise StateError(
                f"{where(path)}: a read-only array cannot be restored in its place",
                mend="put a copy into the state, or leave it out",
                state_path=where(path),
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
        origin: object = None,
    ) -> str:
        """Add an item unless its memory is one already; returns the name."""
        memory = memory_key(source)
        key = None if memory is None else (memory, sharing, global_shape, extents)
        if key is not None and key in self.names:
            self.borrows = self.borrows or (self.own is not None and self.names[key] not in self.own)
            return self.names[key]
        name = layout.join(*path)
        if name in self.taken:
            name = next(new for n in range(2, 1 << 30) if (new := f"{name}~{n}") not in self.taken)
        self.taken.add(name)
        if self.own is not None:
            self.own.add(name)
        if key is not None:
            self.names[key] = name
        self.sources.append(source)
        self.origins.append(origin)
        self.items.append(
            FlatItem(
                name=name,
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
