"""How modules, optimizers, generators and other objects of the state are restored in place."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resil.ckpt import dtypes, plain
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.planning import KEEP_KINDS, Plan, holds, kind_of
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout


def module(plan: Plan, live: nn.Module, node: Any, path: Path) -> None:
    """Compare a module: the same names on both sides; its parameters and buffers are filled in place."""
    if not plan.expect(node, "module", path):
        return
    inner = states.unwrap(live)
    entries = states.module_entries(live, path)
    own = [*inner.parameters(), *inner.buffers()]
    ids, memory = {id(tensor) for tensor in own}, {states.memory_key(_local(tensor)) for tensor in own} - {None}
    stored = dict(node["of"])
    for name in [name for name in entries if name not in stored]:
        plan.differ((*path, name), "is in the state, not in the checkpoint")
    copies: dict[str, Callable[[], Any]] = {}
    for name, entry in stored.items():
        at = (*path, name)
        if name not in entries:
            plan.differ(at, "is in the checkpoint, not in the state")
        elif not holds(entry, KEEP_KINDS):
            here = entries[name]
            if isinstance(here, torch.Tensor) and (id(here) in ids or states.memory_key(_local(here)) in memory):
                plan.tensor(here, entry, at)
            else:  # a copy that a hook made, or extra state: only load_state_dict can take it
                copies[name] = plan.decoding(entry, at, here, _like_template({at: here}))

    def load() -> None:
        whole = inner.state_dict(keep_vars=True)
        whole.update({name: value() for name, value in copies.items()})
        try:
            inner.load_state_dict(whole)
        except Exception as error:
            raise StateError(f"{where(path)}: load_state_dict() failed: {error!r}") from error

    if copies:
        plan.late.append(load)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like_template(templates: Mapping[Path, object]) -> Callable[[dict[str, Any], Path], torch.Tensor | None]:
    """Make distributed tensors like those that are in the state at the same path."""

    def like(node: dict[str, Any], path: Path) -> torch.Tensor | None:
        template = templates.get(path)
        if not isinstance(template, DTensor) or tuple(template.shape) != tuple(node["shape"]):
            return None
        return torch.empty_like(template, dtype=dtypes.torch_dtype(node["dtype"], where(path)))

    return like


def optimizer(plan: Plan, live: torch.optim.Optimizer, node: Any, path: Path, parameters: Mapping[int, Path]) -> None:
    """Compare an optimizer: the same parameters in the same groups; state that is not there yet will be made."""
    if not plan.expect(node, "optimizer", path):
        return
    if node["class"] != type(live).__name__:
        plan.differ(path, f"{node['class']} in the checkpoint, {type(live).__name__} in the state")
        return
    names = [[layout.join(*name) for name in row] for row in states.optimizer_names(live, parameters)]
    stored = [group["params"] for group in node["groups"]]
    if names != stored:
        plan.differ(path, _other_parameters(names, stored))
        return
    by_name: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}
    for index, (group, row, saved) in enumerate(zip(live.param_groups, names, node["groups"], strict=True)):
        by_name.update({name: (p, group) for name, p in zip(row, group["params"], strict=True)})
        for key, entry in saved["of"]:
            _hyperparameter(plan, group, plain.decode_key(key, path), entry, (*path, "groups", str(index)))
    made: list[tuple[torch.Tensor, list[tuple[Any, Callable[[], Any]]]]] = []
    for name, pairs in node["state"]:
        if name not in by_name:
            plan.differ(path, f"has state of {name}, which is in no group")
            continue
        parameter, group = by_name[name]
        made.append((parameter, _parameter_state(plan, live, parameter, group, pairs, (*path, "state", name))))
    others = [
        (plain.decode_key(key, path), plan.decoding(entry, (*path, "other"), None))
        for key, entry in node["other"]
        if not holds(entry, KEEP_KINDS)
    ]

    def put() -> None:
        entries: dict[Any, Any] = {p: {key: value() for key, value in pairs} for p, pairs in made}
        entries.update({key: value() for key, value in others})
        live.state.clear()
        live.state.update(entries)

    plan.copies.append(put)


def _other_parameters(names: list[list[str]], stored: list[list[str]]) -> str:
    here, there = {n for row in names for n in row}, {n for row in stored for n in row}
    for what, some in (("the state", sorted(here - there)), ("the checkpoint", sorted(there - here))):
        if some:
            return f"has {some[0]}{f' and {len(some) - 1} more' if len(some) > 1 else ''} only in {what}"
    return "has its parameters in another order or in other groups"


def _hyperparameter(plan: Plan, group: dict[str, Any], key: Any, node: Any, path: Path) -> None:
    at = (*path, key)
    here = group.get(key)
    if holds(node, KEEP_KINDS):
        return
    if isinstance(here, torch.Tensor):
        plan.tensor(here, node, at)
    else:
        value = plan.decoding(node, at, here)
        plan.copies.append(lambda: group.__setitem__(key, value()))


def _parameter_state(
    plan: Plan,
    live: torch.optim.Optimizer,
    parameter: torch.Tensor,
    group: dict[str, Any],
    pairs: list[Any],
    path: Path,
) -> list[tuple[Any, Callable[[], Any]]]:
    """Plan the state of one parameter; what is there is filled, what is not is made like the parameter."""
    here: Mapping[Any, Any] = live.state.get(parameter, {})
    found: list[tuple[Any, Callable[[], Any]]] = []
    for key_node, node in pairs:
        key = plain.decode_key(key_node, path)
        at = (*path, key)
        value = here.get(key)
        if holds(node, KEEP_KINDS):
            if key in here:
                found.append((key, functools.partial(_same, value)))
        elif isinstance(value, torch.Tensor) and kind_of(node) == "tensor":
            plan.tensor(value, node, at)
            found.append((key, functools.partial(_same, value)))
        else:
            found.append((key, plan.decoding(node, at, value, _like_parameter(parameter, group, key))))
    return found


def _same(value: Any) -> Any:
    return value


def _like_parameter(
    parameter: torch.Tensor, group: Mapping[str, Any], key: object
) -> Callable[[dict[str, Any], Path], torch.Tensor | None]:
    """Make state as torch's own optimizers do: like the parameter, or a counter that is on the host by default."""

    def like(node: dict[str, Any], path: Path) -> torch.Tensor | None:
        dtype, shape = dtypes.torch_dtype(node["dtype"], where(path)), tuple(node["shape"])
        if shape == tuple(parameter.shape) and "expanded" not in node:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        if node.get("sharded"):
            return None
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        return torch.empty(shape, dtype=dtype, device="cpu" if on_host else _local(parameter).device)

    return like


def stateful(plan: Plan, live: Any, node: Any, path: Path) -> None:
    """Rebuild what ``state_dict`` gave and hand it to ``load_state_dict``; types of tensors must not have changed."""
    if not plan.expect(node, "stateful", path):
        return
    templates: dict[Path, object] = {}
    _compare_types(plan, states.stateful_dict(live, path), node["of"], path, templates)
    value = plan.decoding(node["of"], path, None, _like_template(templates))

    def load() -> None:
        try:
            live.load_state_dict(value())
        except Exception as error:
            raise StateError(f"{where(path)}: {type(live).__name__}.load_state_dict() failed: {error!r}") from error

    plan.early.append(load)


def _compare_types(plan: Plan, live: object, node: Any, path: Path, templates: dict[Path, object]) -> None:
    """Note tensors whose type differs. Shapes and keys may: what an object keeps is its own affair."""
    kind = kind_of(node)
    if isinstance(live, torch.Tensor) and kind == "tensor":
        templates[path] = live
        name = dtypes.torch_name(live.dtype, where(path))
        if node["dtype"] != name:
            plan.differ(path, f"{node['dtype']} in the checkpoint, {name} in the state")
    elif isinstance(live, np.ndarray) and kind == "ndarray":
        name = dtypes.numpy_name(live.dtype, where(path))
        if node["dtype"] != name:
            plan.differ(path, f"{node['dtype']} in the checkpoint, {name} in the state")
    elif isinstance(live, Mapping) and kind in plain.DICT_KINDS:
        for key_node, entry in node["of"]:
            key = plain.decode_key(key_node, path)
            if key in live:
                _compare_types(plan, live[key], entry, (*path, key), templates)
    elif isinstance(live, list | tuple):
        of = node if isinstance(node, list) else node.get("of") if isinstance(node, dict) else None
        if isinstance(of, list):
            for index, (value, entry) in enumerate(zip(live, of, strict=False)):
                _compare_types(plan, value, entry, (*path, str(index)), templates)


def generator(plan: Plan, live: Any, node: Any, path: Path) -> None:
    """Set the state of a random generator."""
    if isinstance(live, torch.Generator):
        kind, detail = "torch.Generator", live.device.type
    elif isinstance(live, np.random.Generator):
        kind, detail = "numpy.random.Generator", type(live.bit_generator).__name__
    elif isinstance(live, np.random.RandomState):
        kind, detail = "numpy.random.RandomState", ""
    else:
        assert isinstance(live, random.Random)
        kind, detail = "random.Random", ""
    if not plan.expect(node, kind, path):
        return
    stored = node.get("device", node.get("class", ""))
    if stored != detail:
        plan.differ(path, f"a {kind} of {stored} in the checkpoint, of {detail} in the state")
        return
    value = plan.decoding(node["of"], path)

    def put() -> None:
        if isinstance(live, torch.Generator):
            live.set_state(value().cpu())
        elif isinstance(live, np.random.Generator):
            live.bit_generator.state = value()
        elif isinstance(live, np.random.RandomState):
            live.set_state(value())
        else:
            live.setstate(value())

    plan.copies.append(put)
