"""Load values and items into a state, in place: walk through both, and plan what to do."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

from slurm_resil.ckpt import objects, plain
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.options import LoadOptions, LoadReport
from slurm_resil.ckpt.plain import Path
from slurm_resil.ckpt.planning import EXACT, GENERATOR_KINDS, ITEM_KINDS, KEEP_KINDS, OBJECT_KINDS, Plan, holds, kind_of
from slurm_resil.ckpt.source import Source
from slurm_resil.ckpt.state import Sharded
from slurm_resil.core.errors import StateError

Assign = Callable[[Any], None]  # puts a new value in the place of one that cannot be changed

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)
_DIVISIBLE = (*plain.DICT_KINDS, "list", "tuple", "namedtuple", "dataclass", "module", "optimizer")
_IN_PLACE = (torch.Tensor, np.ndarray, nn.Module, Sharded, random.Random, *_GENERATORS)


def load_into(state: Mapping[str, object], values: Any, source: Source, options: LoadOptions = EXACT) -> LoadReport:
    """Load a checkpoint into a state, in place.

    All names, types and shapes are compared in both directions, and all bytes that are needed are verified, before
    anything is changed.

    Args:
        state: As given to ``flatten``; its optimizers need not have any state yet.
        values: As ``flatten`` made them.
        source: Gives the items.
        options: What may differ.

    Returns:
        What was left as it was, or converted.

    Raises:
        StateError: The state does not fit, as the options have it; lists the first differences. Nothing was changed.
            Or a ``load_state_dict`` of the user raised; then those before it have been called.
        DataError: The bytes are not what they claim to be. Nothing was changed.
    """
    if kind_of(values) != "dict":
        raise StateError(f"the checkpoint holds a {kind_of(values)}, not a state")
    plan = Plan(source, values, options, states.parameter_paths(state))
    _Walker(plan).mapping(state, values, (), top=True)
    plan.refuse()
    source.verify(plan.wants)
    with _trainable():
        plan.run()
    return plan.report


@contextlib.contextmanager
def _trainable() -> Iterator[None]:
    """Leave inference mode: what is made in it can never be trained on, such as an optimizer's state."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def anchored(live: object) -> bool:
    """Whether a value is or contains something that is loaded in place."""
    if isinstance(live, _IN_PLACE):
        return True
    if states.is_stateful(live):
        return True
    if isinstance(live, Mapping):
        return any(anchored(entry) for entry in live.values())
    if isinstance(live, list | tuple | set | frozenset):
        return any(anchored(entry) for entry in live)
    if dataclasses.is_dataclass(live) and not isinstance(live, type):
        return any(anchored(getattr(live, field.name)) for field in dataclasses.fields(live))
    return False


def _only_arrays(live: object) -> bool:
    """Whether everything in it that is loaded in place could as well be made anew."""
    if isinstance(live, torch.Tensor | np.ndarray):
        return True
    if isinstance(live, Mapping):
        return all(_only_arrays(entry) for entry in live.values())
    if isinstance(live, list | tuple):
        return all(_only_arrays(entry) for entry in live)
    return not anchored(live)


class _Walker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def match(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        """Compare a value of the state with a node, and plan what to do."""
        plan, kind = self._plan, kind_of(node)
        amount = plan.amount(node, path)
        if amount == "none" or kind in KEEP_KINDS:
            plan.leaves_out(node, path, live)
        elif amount == "some" and kind not in _DIVISIBLE:
            raise AssertionError(f"{path}: only a part of a {kind} is wanted")
        elif isinstance(live, torch.Tensor):
            plan.tensor(live, node, path)
        elif isinstance(live, np.ndarray):
            plan.array(live, node, path)
        elif isinstance(live, nn.Module):
            objects.module(plan, live, node, path)
        elif isinstance(live, torch.optim.Optimizer) and states.is_plain_optimizer(live):
            objects.optimizer(plan, live, node, path)
        elif isinstance(live, Sharded):
            if plan.expect(node, "sharded", path):
                plan.tensor(live.tensor, node["of"], path, sharded=live)
        elif isinstance(live, _GENERATORS) or type(live) is random.Random:
            objects.generator(plan, live, node, path)
        elif states.is_stateful(live):
            objects.stateful(plan, live, node, path)
        elif amount == "some" or anchored(live) or holds(node, KEEP_KINDS):
            self._container(live, node, path, assign)
        elif kind in (*OBJECT_KINDS, *GENERATOR_KINDS):
            plan.differ(path, f"a {kind} in the checkpoint, a {type(live).__name__} in the state")
        else:
            self._replace(live, node, path, assign)

    def _replace(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        """Put a plain value in place; a list or dict stays the same object."""
        if kind_of(node) in ("tensor", "ndarray") and live is not None:
            self._plan.differ(path, f"a {kind_of(node)} in the checkpoint, a {type(live).__name__} in the state")
            return
        value = self._plan.decoding(node, path, live)
        if isinstance(live, dict) and type(live) is plain.DICT_KINDS.get(kind_of(node)):
            self._plan.copies.append(lambda: _refill(live, value()))
        elif type(live) is list and isinstance(node, list):
            self._plan.copies.append(lambda: live.__setitem__(slice(None), value()))
        elif assign is None:
            self._plan.differ(path, "cannot be restored: what holds it cannot be changed")
        else:
            self._plan.copies.append(lambda: assign(value()))

    def _container(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        kind = kind_of(node)
        if isinstance(live, MutableMapping) and kind in plain.DICT_KINDS:
            self.mapping(live, node, path)
        elif isinstance(live, list) and kind == "list":
            self._list(live, node, path)
        elif isinstance(live, tuple) and kind in ("tuple", "namedtuple") and len(live) == len(node["of"]):
            self._tuple(live, node["of"], path, assign)
        elif dataclasses.is_dataclass(live) and kind == "dataclass":
            self._dataclass(live, node, path, assign)
        else:
            what = f" of {len(node['of'])} entries" if kind == "tuple" else ""
            self._plan.differ(path, f"a {kind}{what} in the checkpoint, a {type(live).__name__} in the state")

    def mapping(self, live: Mapping[Any, Any], node: Any, path: Path, *, top: bool = False) -> None:
        """Compare a mapping: what is loaded in place must be on both sides, plain values may come and go.

        Args:
            live: Mapping of the state.
            node: Its node.
            path: Its path.
            top: It is the state itself: all keys must be on both sides.
        """
        stored = {json.dumps(key, sort_keys=True): (key, entry) for key, entry in node["of"]}
        here = {json.dumps(plain.encode_key(key, path), sort_keys=True): key for key in live}
        target = live if isinstance(live, MutableMapping) else None
        for text, key in here.items():
            if text in stored:
                self.match(live[key], stored[text][1], (*path, key), None if target is None else _setter(target, key))
            elif top or target is None or anchored(live[key]):
                self._plan.missing((*path, key), live[key])
            elif not self._plan.selection.takes((*path, key)):
                self._plan.missing((*path, key))
            else:
                self._plan.copies.append(_remover(target, key))
        for text, (key_node, entry) in stored.items():
            if text in here:
                continue
            key = plain.decode_key(key_node, path)
            if holds(entry, KEEP_KINDS):
                self._plan.leaves_out(entry, (*path, key))
            elif top or target is None or holds(entry, (*OBJECT_KINDS, *GENERATOR_KINDS, *ITEM_KINDS)):
                self._plan.unexpected((*path, key), entry)
            elif self._plan.amount(entry, (*path, key)) == "none":
                self._plan.leaves_out(entry, (*path, key))
            else:
                self._plan.copies.append(_later(_setter(target, key), self._plan.decoding(entry, (*path, key))))

    def _list(self, live: list[Any], of: list[Any], path: Path) -> None:
        if len(of) == len(live):
            for index, entry in enumerate(of):
                self.match(live[index], entry, (*path, str(index)), _setter(live, index))
        elif self._plan.amount(of, path) == "all" and _only_arrays(live):  # a list that grows, such as a history
            value = self._plan.decoding(of, path, live)
            self._plan.copies.append(lambda: live.__setitem__(slice(None), value()))
        else:
            self._plan.differ(path, f"{len(of)} entries in the checkpoint, {len(live)} in the state")

    def _tuple(self, live: Any, of: list[Any], path: Path, assign: Assign | None) -> None:
        holder: dict[int, Any] = dict(enumerate(live))
        for index, entry in enumerate(of):
            self.match(live[index], entry, (*path, str(index)), assign and _setter(holder, index))
        if assign is not None:
            make = getattr(live, "_make", type(live))

            def put() -> None:
                if any(new is not old for new, old in zip(holder.values(), live, strict=True)):
                    assign(make(holder.values()))

            self._plan.copies.append(put)

    def _dataclass(self, live: Any, node: Any, path: Path, assign: Assign | None) -> None:
        names = [field.name for field in dataclasses.fields(live)]
        stored = dict(node["of"])
        if set(names) != set(stored):
            self._plan.differ(path, f"fields {sorted(stored)} in the checkpoint, {sorted(names)} in the state")
            return
        frozen = type(live).__dataclass_params__.frozen
        holder: dict[str, Any] = {}
        for name in names:
            to = (assign and _setter(holder, name)) if frozen else _field_setter(live, name)
            self.match(getattr(live, name), stored[name], (*path, name), to)
        if frozen and assign is not None:

            def put() -> None:
                if holder:
                    new = copy.copy(live)
                    for name, value in holder.items():
                        object.__setattr__(new, name, value)
                    assign(new)

            self._plan.copies.append(put)


def _setter(container: Any, key: Any) -> Assign:
    return lambda value: container.__setitem__(key, value)


def _field_setter(live: Any, name: str) -> Assign:
    return lambda value: setattr(live, name, value)


def _later(assign: Assign, value: Callable[[], Any]) -> Callable[[], None]:
    return lambda: assign(value())


def _remover(container: MutableMapping[Any, Any], key: Any) -> Callable[[], None]:
    return lambda: container.__delitem__(key)


def _refill(live: dict[Any, Any], value: dict[Any, Any]) -> None:
    live.clear()
    live.update(value)
    if hasattr(value, "default_factory") and hasattr(live, "default_factory"):
        live.default_factory = value.default_factory
