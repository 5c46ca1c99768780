"""Load values and items into a state, in place: first everything is compared, then everything is verified, then changed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

from slurm_resil.ckpt import dtypes, plain, sharding
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.source import Source, Want, fresh
from slurm_resil.ckpt.state import Array, Sharded
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout

Assign = Callable[[Any], None]
Like = Callable[[dict[str, Any], Path], torch.Tensor | None]  # an empty tensor for a node, None for the default

SHOWN = 5  # differences that an error lists
ITEM_KINDS = ("tensor", "ndarray", "bytes")
LIVE_KINDS = (
    "module",
    "optimizer",
    "stateful",
    "sharded",
    "torch.Generator",
    "numpy.random.Generator",
    "numpy.random.RandomState",
    "random.Random",
)


def load_into(state: Mapping[str, object], values: Any, source: Source) -> None:
    """Load a checkpoint into a state, in place.

    All names, types and shapes are compared in both directions, and all bytes that are needed are verified, before
    anything is changed.

    Args:
        state: As given to ``flatten``; it need not have the optimizer's state yet.
        values: As ``flatten`` made them.
        source: Gives the items.

    Raises:
        StateError: The state does not fit; lists the first differences. Nothing was changed. Or a ``load_state_dict``
            of the user raised; then others may have been called.
        DataError: The bytes are not what they claim to be. Nothing was changed.
    """
    planner = _Planner(source, states.parameter_paths(state))
    planner.top(state, values)
    planner.refuse()
    source.verify(planner.wants)
    planner.run()


def _kind(node: Any) -> str:
    if isinstance(node, dict):
        return str(node.get("$"))
    return "list" if isinstance(node, list) else "value"


def _holds(node: Any, kinds: tuple[str, ...]) -> bool:
    """Whether a node is or contains one of some kinds."""
    if isinstance(node, dict):
        return node.get("$") in kinds or any(_holds(entry, kinds) for entry in node.values())
    return isinstance(node, list) and any(_holds(entry, kinds) for entry in node)


def _anchored(live: object) -> bool:
    """Whether a live value is or contains something that is loaded in place."""
    if isinstance(live, torch.Tensor | np.ndarray | torch.Generator | np.random.Generator | np.random.RandomState):
        return True
    if isinstance(live, Sharded | nn.Module | random.Random) or states.is_stateful(live):
        return True
    if isinstance(live, Mapping):
        return any(_anchored(entry) for entry in live.values())
    if isinstance(live, list | tuple | set | frozenset):
        return any(_anchored(entry) for entry in live)
    if dataclasses.is_dataclass(live) and not isinstance(live, type):
        return any(_anchored(getattr(live, field.name)) for field in dataclasses.fields(live))
    return False


class _Planner:
    """Compares first (the methods named for kinds), collecting what to do; ``run`` does it."""

    def __init__(self, source: Source, parameters: Mapping[int, Path]) -> None:
        self._source, self._parameters = source, parameters
        self.faults: list[str] = []
        self.wants: list[Want] = []
        self._early: list[Callable[[], None]] = []  # the user's code, which may raise
        self._copies: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []  # modules that hand out copies
        self._prepare: list[Callable[[], None]] = []  # decode what is new, change nothing
        self._places: dict[object, str] = {}  # memory -> item that goes there
        self._decoded: dict[tuple[str, str], Any] = {}  # item -> tensor made for it, so that shared ones stay shared

    # -- the end

    def refuse(self) -> None:
        """Raise if anything does not fit."""
        if self.faults:
            more = f"; and {len(self.faults) - SHOWN} more" if len(self.faults) > SHOWN else ""
            raise StateError(
                f"the state does not fit the checkpoint: {'; '.join(self.faults[:SHOWN])}{more}",
                mend="restore into the state that was saved, or start a run of another name",
                differences=len(self.faults),
            )

    def run(self) -> None:
        """Change the state."""
        for steps in (self._prepare, self._early, self._copies, self._late):
            for step in steps:
                step()

    def _differ(self, path: Path, text: str) -> None:
        self.faults.append(f"{where(path)}: {text}")

    # -- walking

    def top(self, state: Mapping[str, object], values: Any) -> None:
        """Compare the whole state; its keys must be the same on both sides."""
        if _kind(values) != "dict":
            raise StateError(f"the checkpoint holds a {_kind(values)}, not a state")
        self._mapping(state, values, (), strict=True)

    def match(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        """Compare a live value with a node; ``assign`` puts a new value in its place."""
        kind = _kind(node)
        if kind == "keep":
            return
        if isinstance(live, torch.Tensor):
            self._expect(kind, "tensor", path) and self._tensor(live, node, path)
        elif isinstance(live, np.ndarray):
            self._expect(kind, "ndarray", path) and self._array(live, node, path, assign)
        elif isinstance(live, nn.Module):
            self._expect(kind, "module", path) and self._module(live, node, path)
        elif isinstance(live, torch.optim.Optimizer) and states.is_plain_optimizer(live):
            self._expect(kind, "optimizer", path) and self._optimizer(live, node, path)
        elif isinstance(live, Sharded):
            self._expect(kind, "sharded", path) and self._sharded(live, node["of"], path)
        elif isinstance(live, torch.Generator | np.random.Generator | np.random.RandomState) or type(live) is random.Random:
            self._generator(live, node, path)
        elif states.is_stateful(live):
            self._expect(kind, "stateful", path) and self._stateful(live, node, path)
        elif kind in LIVE_KINDS:
            self._differ(path, f"a {kind} in the checkpoint, a {type(live).__name__} in the state")
        elif not _anchored(live):
            self._replace(live, node, path, assign)
        else:
            self._container(live, node, path, assign)

    def _expect(self, found: str, expected: str, path: Path) -> bool:
        if found != expected:
            self._differ(path, f"a {found} in the checkpoint, a {expected} in the state")
        return found == expected

    def _replace(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        """Put a value that holds nothing in place; the container it lives in stays the same object where it can."""
        if _holds(node, LIVE_KINDS):
            self._differ(path, "holds objects in the checkpoint that are not in the state")
            return
        value = self.decoding(node, path, live)
        if type(live) in plain.DICT_KINDS.values() and _kind(node) == plain.DICT_KINDS_BY_TYPE[type(live)]:
            self._early.append(lambda: _refill(live, value()))
        elif type(live) is list and _kind(node) == "list":
            self._early.append(lambda: live.__setitem__(slice(None), value()))
        elif assign is None:
            self._differ(path, "cannot be put in place: what holds it cannot be changed")
        else:
            self._early.append(lambda: assign(value()))

    def _container(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        kind = _kind(node)
        if isinstance(live, MutableMapping):
            if kind in plain.DICT_KINDS:
                self._mapping(live, node, path, strict=False)
            else:
                self._differ(path, f"a {kind} in the checkpoint, a {type(live).__name__} in the state")
        elif isinstance(live, list | tuple):
            self._sequence(live, node, path, assign)
        elif dataclasses.is_dataclass(live) and kind == "dataclass":
            self._dataclass(live, node, path, assign)
        else:
            self._differ(path, f"a {kind} in the checkpoint, a {type(live).__name__} in the state")

    def _mapping(self, live: Any, node: Any, path: Path, *, strict: bool) -> None:
        stored = {json.dumps(key, sort_keys=True): (key, entry) for key, entry in node["of"]}
        here = {json.dumps(plain.encode_key(key, path), sort_keys=True): key for key in live}
        setter = isinstance(live, MutableMapping)
        for text, key in here.items():
            at = (*path, key)
            if text in stored:
                assign = _setter(live, key) if setter else None
                self.match(live[key], stored[text][1], at, assign)
            elif strict or _anchored(live[key]):
                self._differ(at, "is in the state, not in the checkpoint")
            else:
                self._early.append(_remover(live, key))
        for text, (key, entry) in stored.items():
            if text not in here:
                plain_key = plain.decode_key(key, path)
                at = (*path, plain_key)
                if _kind(entry) == "keep":
                    continue
                if strict or not setter or _holds(entry, (*LIVE_KINDS, *ITEM_KINDS)):
                    self._differ(at, "is in the checkpoint, not in the state")
                else:
                    value = self.decoding(entry, at, None)
                    self._early.append(_adder(live, plain_key, value))

    def _sequence(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        of = node if isinstance(node, list) else node.get("of") if isinstance(node, dict) else None
        if _kind(node) not in ("list", "tuple", "namedtuple") or isinstance(live, list) != (_kind(node) == "list"):
            self._differ(path, f"a {_kind(node)} in the checkpoint, a {type(live).__name__} in the state")
            return
        assert isinstance(of, list)
        if len(of) != len(live):
            if isinstance(live, list) and not _holds(node, LIVE_KINDS) and not any(map(_deep, live)):
                value = self.decoding(node, path, live)  # a list that grows, such as a history
                self._early.append(lambda: live.__setitem__(slice(None), value()))
            else:
                self._differ(path, f"{len(of)} entries in the checkpoint, {len(live)} in the state")
            return
        self._through_holder(live, list(live), of, path, assign)

    def _through_holder(self, live: Any, entries: list[Any], of: list[Any], path: Path, assign: Assign | None) -> None:
        if isinstance(live, list):
            for index, entry in enumerate(of):
                self.match(live[index], entry, (*path, str(index)), _setter(live, index))
            return
        holder: dict[int, Any] = dict(enumerate(entries))
        before = len(self._early)
        for index, entry in enumerate(of):
            self.match(entries[index], entry, (*path, str(index)), _setter(holder, index))
        if len(self._early) > before and assign is not None:
            make = getattr(live, "_make", type(live))
            self._early.append(lambda: _assign_changed(assign, entries, list(holder.values()), make))

    def _dataclass(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        names = [field.name for field in dataclasses.fields(live)]
        stored = dict(node["of"])
        if set(names) != set(stored) or plain.class_name(type(live)) != node["class"]:
            self._differ(path, f"a {node['class']} with other fields in the checkpoint")
            return
        for name in names:
            self.match(getattr(live, name), stored[name], (*path, name), _field_setter(live, name))

    # -- leaves

    def _tensor(self, live: torch.Tensor, node: dict[str, Any], path: Path, *, sharded: Sharded | None = None) -> None:
        states.check_tensor(live, path)
        if sharded is None:
            part = sharding.part_of(live, where(path))
        else:
            shape = tuple(sharded.global_shape)
            part = sharding.Part(
                local=live.detach(), global_shape=shape, extents=tuple(sharded.extents), whole=False
            )
        local = states.compact(part.local) if part.whole else part.local
        full = tuple(node.get("expanded", node["shape"]))
        spread = part.whole and "expanded" in node and tuple(local.shape) == full != tuple(node["shape"])
        if spread:  # stored once, dense here: fill one copy and spread it
            shape = tuple(node["shape"])
            want = self._want(node, dtypes.torch_name(live.dtype, where(path)), shape, shape, (), True, path)
            self._copies.append(lambda: self._spread(want, local))
            return
        global_shape = tuple(local.shape) if part.whole else part.global_shape
        if part.whole and tuple(live.shape) != full:
            self._differ(path, f"shape {full} in the checkpoint, {tuple(live.shape)} in the state")
            return
        want = self._want(
            node, dtypes.torch_name(live.dtype, where(path)), tuple(local.shape), global_shape, part.extents, part.whole, path
        )
        if self._is_first(states.memory_key(local), node["item"], path):
            self._copies.append(lambda: self._source.fill(want, local))

    def _spread(self, want: Want, target: torch.Tensor) -> None:
        one = fresh(want.dtype, want.local_shape, want.where)
        self._source.fill(want, one)
        assert isinstance(one, torch.Tensor)
        with torch.no_grad():
            target.copy_(one.expand(target.shape))

    def _is_first(self, memory: object, name: str, path: Path) -> bool:
        """Whether a place is new; tied places must be tied in the checkpoint too."""
        if memory is None:
            return True
        other = self._places.setdefault(memory, name)
        if other != name:
            self._differ(path, f"is the same memory as {other} in the state, but not in the checkpoint")
            return False
        first = (memory, "filled") not in self._places
        self._places[(memory, "filled")] = name
        return first

    def _want(
        self, node: Any, dtype: str, local: Any, shape: Any, extents: Any, whole: bool, path: Path
    ) -> Want:
        want = Want(
            name=node["item"],
            dtype=dtype,
            local_shape=local,
            global_shape=shape,
            extents=extents,
            whole=whole,
            where=where(path),
        )
        if fault := self._source.misfit(want):
            self.faults.append(fault)
        else:
            self.wants.append(want)
        return want
