"""How modules, optimizers, generators and other objects of the state are restored in place."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resil.ckpt import dtypes, meta, names, plain
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.planning import KEEP_KINDS, Plan, holds, kind_of
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout


def module(plan: Plan, live: nn.Module, node: Any, path: Path) -> None:
    """Compare a module: the same names on both sides; its parameters and buffers are filled in place."""
    if not plan.expect(node, "module", path):
        return
    inner = names.unwrap(live)
    entries = states.module_entries(live, path)
    own = [*inner.parameters(), *inner.buffers()]
    ids = {id(tensor) for tensor in own}

    @functools.cache
    def memory() -> set[object]:  # only where a tensor is not found by itself
        return {states.memory_key(_local(tensor)) for tensor in own} - {None}

    stored = dict(node["of"])
    for name in [name for name in entries if name not in stored]:
        plan.missing((*path, name), entries[name])
    copies: dict[str, Callable[[], Any]] = {}
    for name, entry in stored.items():
        at = (*path, name)
        if name not in entries:
            plan.unexpected(at, entry)
        elif not plan.leaves_out(entry, at, entries[name]):
            here = entries[name]
            if isinstance(here, torch.Tensor) and (id(here) in ids or states.memory_key(_local(here)) in memory()):
                plan.tensor(here, entry, at)
            else:  # a copy that a hook made, or extra state: only load_state_dict can take it
                copies[name] = _decoding(plan, here, entry, at)
    for name, buffer in inner.named_buffers():
        plain_name = names.plain_name(inner, name)
        if plain_name not in entries and meta.is_meta(buffer):
            plan.missing(
                (*path, plain_name), text="is on the meta device, and no state dict has it: give it values first"
            )

    def load() -> None:
        whole = inner.state_dict(keep_vars=True)
        known = names.plain_names(inner, whole, path)
        whole.update({known.get(name, name): value() for name, value in copies.items()})
        try:
            inner.load_state_dict(whole)
        except Exception as error:
            raise StateError(f"{where(path)}: load_state_dict() failed: {error!r}") from error

    if copies:
        plan.late.append(load)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _decoding(plan: Plan, live: object, node: Any, path: Path) -> Callable[[], Any]:
    """Plan to rebuild what an object will be handed; what is in it now says which types, and how to shard."""
    templates: dict[Path, object] = {}
    _compare_types(plan, live, node, path, templates)
    return plan.decoding(node, path, live, _like_template(plan, templates))


def _like_template(
    plan: Plan, templates: Mapping[Path, object]
) -> Callable[[dict[str, Any], Path], torch.Tensor | None]:
    """Make tensors like those that are in the state at the same path, where it matters."""

    def like(node: dict[str, Any], path: Path) -> torch.Tensor | None:
        template = templates.get(path)
        if not isinstance(template, torch.Tensor):
            return None
        dtype = template.dtype if plan.options.cast else dtypes.torch_dtype(node["dtype"], where(path))
        if isinstance(template, DTensor):
            if list(template.shape) != list(node["shape"]):
                return None
            device = template.device_mesh.device_type if meta.is_meta(template) else template.device
            return torch.empty_like(template, dtype=dtype, device=device)
        if dtypes.torch_name(dtype, where(path)) == node["dtype"] and not node.get("sharded"):
            return None
        return torch.empty(tuple(node["shape"]), dtype=dtype, device="cpu" if template.is_meta else template.device)

    return like


def optimizer(plan: Plan, live: torch.optim.Optimizer, node: Any, path: Path) -> None:
    """Compare an optimizer: the same parameters, by name; state that is not there yet will be made."""
    if not plan.expect(node, "optimizer", path):
        return
    if node["class"] != type(live).__name__:
        plan.differ(path, f"{node['class']} in the checkpoint, {type(live).__name__} in the state")
        return
    rows = [[layout.join(*name) for name in row] for row in states.optimizer_names(live, plan.parameters)]
    stored = [group["params"] for group in node["groups"]]
    here, there = ({name: i for i, row in enumerate(of) for name in row} for of in (rows, stored))
    if rows != stored and (fault := _order_matters(live, here.keys() | there.keys())):
        plan.differ(path, fault)
        return
    _groups(plan, live, node, path, (rows, there))
    by_name = {
        name: (parameter, group)
        for row, group in zip(rows, live.param_groups, strict=True)
        for name, parameter in zip(row, group["params"], strict=True)
    }
    kept = [by_name[name][0] for name in here.keys() - there.keys()]
    for name in [name for name in here if name not in there]:
        plan.missing((*path, "state", name))
    known = dict(node["state"])
    for name in [name for name in there if name not in here]:
        plan.unexpected((*path, "state", name), known.get(name))
    made: list[tuple[torch.Tensor, list[tuple[Any, Callable[[], Any]]]]] = []
    for name, pairs in known.items():
        at = (*path, "state", name)
        if name in here and not plan.leaves_out(None, at):
            made.append((by_name[name][0], _parameter_state(plan, live, *by_name[name], pairs, at)))
        elif name in here:
            kept.append(by_name[name][0])
        elif name not in there:
            plan.differ(path, f"has state of {name}, which is in no group")
    others: list[tuple[Any, Callable[[], Any]]] = []
    for key_node, entry in node["other"]:
        key = plain.decode_key(key_node, path)
        if not plan.leaves_out(entry, (*path, "other", key)):
            others.append((key, plan.decoding(entry, (*path, "other"), None)))
        elif key in live.state:
            kept.append(key)

    def put() -> None:
        entries: dict[Any, Any] = {key: live.state[key] for key in kept if key in live.state}
        entries.update({p: {key: value() for key, value in pairs} for p, pairs in made})
        entries.update({key: value() for key, value in others})
        live.state.clear()
        live.state.update(entries)

    plan.copies.append(put)


def _order_matters(live: torch.optim.Optimizer, names: Collection[str]) -> str:
    """Why an optimizer needs its parameters in the order of the checkpoint; nothing if it does not."""
    if isinstance(live, torch.optim.LBFGS):
        return "has its parameters in another order, and keeps one state for all of them together"
    if any(name.startswith("#") for name in names):
        return "has its parameters in another order or in other groups, and no module of the state names them"
    return ""


def _groups(
    plan: Plan,
    live: torch.optim.Optimizer,
    node: Any,
    path: Path,
    names: tuple[list[list[str]], Mapping[str, int]],
) -> None:
    """Compare the groups: those with the same parameters belong together, whatever the order.

    Args:
        plan: Where to note it.
        live: Optimizer of the state.
        node: Its node.
        path: Its path.
        names: Names of the parameters by group, in the state; group of each name, in the checkpoint.
    """
    rows, there = names
    taken: dict[int, int] = {}
    for index, row in enumerate(rows):
        at = (*path, "groups", str(index))
        origins = {there[name] for name in row if name in there}
        if not origins and len(node["groups"]) == len(rows) and not row and not node["groups"][index]["params"]:
            origins = {index}
        wanted = [key for key in live.param_groups[index] if key != "params" and plan.selection.takes((*at, key))]
        if not origins:
            if row or wanted:
                plan.missing(at)
        elif wanted and (len(origins) > 1 or taken.setdefault(min(origins), index) != index):
            plan.differ(
                at,
                "has its parameters in other groups in the checkpoint; "
                f"exclude '{where((*path, 'groups'))}' to load the state of each parameter and keep these groups",
            )
        else:
            for key_node, entry in node["groups"][min(origins)]["of"]:
                _hyperparameter(plan, live.param_groups[index], plain.decode_key(key_node, path), entry, at)


def _hyperparameter(plan: Plan, group: dict[str, Any], key: Any, node: Any, path: Path) -> None:
    at = (*path, key)
    here = group.get(key)
    if key == "param_names" or plan.leaves_out(node, at, here):  # names are as the state has them
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
            plan.leaves_out(node, at)
            if key in here:
                found.append((key, functools.partial(_same, value)))
        elif isinstance(value, torch.Tensor) and kind_of(node) == "tensor":
            plan.tensor(value, node, at)
            found.append((key, functools.partial(_same, value)))
        else:
            plan.need(parameter, at)
            found.append((key, plan.decoding(node, at, value, _like_parameter(plan, parameter, group, path[-1], key))))
    return found


def _same(value: Any) -> Any:
    return value


def _like_parameter(
    plan: Plan, parameter: torch.Tensor, group: Mapping[str, Any], name: object, key: object
) -> Callable[[dict[str, Any], Path], torch.Tensor | None]:
    """Make state as torch's own optimizers do: like the parameter, or a counter that is on the host by default."""

    def like(node: dict[str, Any], path: Path) -> torch.Tensor | None:
        dtype, shape = dtypes.torch_dtype(node["dtype"], where(path)), tuple(node["shape"])
        real = plan.making.real(parameter).detach()
        if plan.options.cast and shape and key != "step" and node["dtype"] == plan.parameter_dtypes.get(str(name)):
            dtype = parameter.dtype  # of the parameter's own precision then, so now as well
        if shape == tuple(parameter.shape) and "expanded" not in node:
            return torch.empty_like(real, dtype=dtype)
        if node.get("sharded"):
            return None
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        return torch.empty(shape, dtype=dtype, device="cpu" if on_host else _local(real).device)

    return like


def stateful(plan: Plan, live: Any, node: Any, path: Path) -> None:
    """Rebuild what ``state_dict`` gave and hand it to ``load_state_dict``; types of tensors must not have changed."""
    if not plan.expect(node, "stateful", path):
        return
    value = _decoding(plan, states.stateful_dict(live, path), node["of"], path)

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
        if node["dtype"] != name and not (plan.options.cast and dtypes.can_cast(node["dtype"], name)):
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
