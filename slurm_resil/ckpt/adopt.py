"""Checkpoints of other programs as states of ours: what of them is which part of a training script's state.

What a training script keeps as modules, optimizers and objects is dicts in a foreign checkpoint. Here each such dict is
dressed as what it came from, so that it is taken apart by the same code as a live state, and restored like one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slurm_resil.ckpt import saved
from slurm_resil.ckpt.flat import Flat, raw_bytes
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.foreign import Foreign, Later
from slurm_resil.ckpt.snapshot import slot_items, slot_spec
from slurm_resil.core.errors import StateError, UsageError
from slurm_resil.core.model import RunInfo
from slurm_resil.format.manifest import ShardManifest

ATTEMPT = (1 << 31) - 1  # no attempt of a run has it: shards on nodes are never mixed with what was imported
_RULE = re.compile(r"^([^:=]+)(?::([A-Za-z_][A-Za-z0-9_]*))?(?:=(.*))?$")
_KINDS = ("module", "value", "stateful")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_MEND = "say it as in --as optimizer:AdamW=optim"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What becomes a part of the state.

    Attributes:
        key: Key in the state.
        kind: ``module``, ``value``, ``stateful``, or the class of an optimizer; empty: by what it looks like.
        place: Where it is in the foreign checkpoint: keys joined by dots, or what names begin with; empty: all of it;
            None: under the same key if there is one, else all of it.
    """

    key: str
    kind: str
    place: str | None = None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read ``KEY[:KIND][=PLACE]``.

        Raises:
            UsageError: It is not like that.
        """
        match = _RULE.match(text)
        if match is None:
            raise UsageError(f"--as {text!r} is not KEY[:KIND][=PLACE]", mend="as in --as model=module, or " + _MEND)
        return cls(key=match[1], kind=match[2] or "", place=match[3])


class _Module(nn.Module):
    """In place of a module of which only the state dict is there."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__()
        self._entries = dict(entries)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return dict(self._entries)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return ((name, entry) for name, entry in self._entries.items() if isinstance(entry, torch.Tensor))


class _Stateful:
    """In place of an object of which only the state dict is there."""

    def __init__(self, given: object) -> None:
        self._given = given

    def state_dict(self) -> object:
        return self._given

    def load_state_dict(self, _: object) -> None:
        raise AssertionError("nothing is restored into a foreign checkpoint")


def mapped(foreign: Foreign, rules: Sequence[Rule], ties: Sequence[tuple[str, str]] = ()) -> dict[str, object]:
    """Make a state of a foreign checkpoint.

    Args:
        foreign: It.
        rules: What becomes what; none: each key of it is one of the state, or all of it is the module ``model``.
        ties: Names in the state (``model/head.weight``) of tensors that are the same memory as another one.

    Raises:
        UsageError: It cannot be told what something is, or it is not there.
        DataError: Something that is needed is damaged, or only its own code could read it.
    """
    tree = foreign.tree
    if not rules and _looks(tree) == "value":
        rules = [Rule(key=str(key), kind="") for key in tree]
    elif not rules:
        rules = [Rule(key="model", kind="", place="")]
    if twice := {rule.key for rule in rules if [one.key for one in rules].count(rule.key) > 1}:
        raise UsageError(f"{min(twice)} is named twice", mend="give each part of the state one --as")
    parts = {rule.key: (rule, _resolved(_pick(tree, rule, foreign.path))) for rule in rules}
    _tie(parts, ties)
    state: dict[str, object] = {}
    modules: dict[str, dict[str, Any]] = {}
    later: list[tuple[str, str, Any]] = []
    for key, (rule, value) in parts.items():
        kind = rule.kind or _looks(value)
        state[key] = value
        if kind == "module":
            _check_module(key, value)
            modules[key] = value
            state[key] = _Module(value)
        elif kind == "stateful":
            state[key] = _Stateful(value)
        elif kind == "optimizer":
            raise UsageError(
                f"{key} is an optimizer's state, which does not say of what class",
                mend=f"say it as in --as {key}:AdamW{f'={rule.place}' if rule.place else ''}",
            )
        elif kind != "value":
            later.append((key, kind, value))
    for key, name, given in later:
        state[key] = _optimizer(key, name, given, modules)
    return state


def _pick(tree: Any, rule: Rule, path: str) -> Any:
    place = rule.place
    if place is None:
        return next((value for key, value in tree.items() if str(key) == rule.key), tree)
    if not place:
        return tree
    found = tree
    for key in place.split("."):
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
            continue
        names = {str(one): one for one in found} if isinstance(found, dict) else {}
        if key not in names:
            break
        found = found[names[key]]
    else:
        return found
    begin = place if place.endswith(".") else f"{place}."
    flat = {key.removeprefix(begin): value for key, value in tree.items() if str(key).startswith(begin)}
    if not flat:
        there = ", ".join(sorted({str(key).split(".")[0] for key in tree})[:8])
        raise UsageError(f"{path} has nothing at {place!r}", mend=f"at its top there are: {there}")
    return flat


def _resolved(value: Any) -> Any:
    """Read what was left for later."""
    if isinstance(value, Later):
        return value.read()
    if type(value) is dict:
        return {key: _resolved(entry) for key, entry in value.items()}
    return [_resolved(entry) for entry in value] if type(value) is list else value


def _looks(value: object) -> str:
    if isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
        return "optimizer"
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return "module" if all(isinstance(entry, torch.Tensor) for entry in value.values()) else "value"
    return "value"


def _check_module(key: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UsageError(
            f"{key} is no module's state dict but a {type(value).__name__}", mend=f"leave the kind out: --as {key}"
        )
    if not value:
        raise UsageError(f"{key} has no tensor", mend="say another place, as in --as model=module")


def _tie(parts: Mapping[str, tuple[Rule, Any]], ties: Sequence[tuple[str, str]]) -> None:
    for name, other in ties:
        (holder, key), (source, origin) = (_place(parts, one) for one in (name, other))
        if origin not in source or not isinstance(source[origin], torch.Tensor):
            raise UsageError(
                f"--tie {name}={other}: there is no tensor {other}", mend="names are as ckpt show has them"
            )
        there = holder.get(key)
        like = source[origin]
        if isinstance(there, torch.Tensor) and (there.shape, there.dtype) != (like.shape, like.dtype):
            raise UsageError(
                f"--tie {name}={other}: one is {there.dtype} {tuple(there.shape)}, the other {like.dtype} "
                f"{tuple(like.shape)}"
            )
        holder[key] = like


def _place(parts: Mapping[str, tuple[Rule, Any]], name: str) -> tuple[dict[str, Any], str]:
    key, _, inner = name.partition("/")
    value = parts[key][1] if key in parts else None
    if not inner or not isinstance(value, dict):
        raise UsageError(
            f"--tie: {name} is no tensor of a module", mend="as in --tie model/head.weight=model/wte.weight"
        )
    return value, inner


def _optimizer(key: str, name: str, value: Any, modules: Mapping[str, dict[str, Any]]) -> torch.optim.Optimizer:
    """Dress an optimizer's state dict as an optimizer of that class."""
    if _looks(value) != "optimizer" or not isinstance(value["param_groups"], list):
        raise UsageError(
            f"{key} is no state dict of an optimizer: it has no state and param_groups",
            mend="take optimizer.state_dict(), or get_optimizer_state_dict() without flattening",
        )
    owner, rows = _parameters(key, value, modules)
    module = modules[owner]
    states = {str(number): entry for number, entry in value["state"].items()}
    made: torch.optim.Optimizer = torch.optim.Optimizer.__new__(type(name, (torch.optim.Optimizer,), {}))
    made.param_groups, made.state = [], {}  # type: ignore[assignment]
    for group, row in zip(value["param_groups"], rows, strict=True):
        others = {entry: what for entry, what in group.items() if entry not in ("params", "param_names")}
        made.param_groups.append({"params": [module[one] for one in row], **others})
        for number, one in zip(group["params"], row, strict=True):
            entries = states.pop(str(number), None)
            if entries is not None:
                made.state[module[one]] = entries
    if states:
        raise UsageError(f"{key} has state of {min(states)}, which is in none of its groups")
    return made


def _parameters(key: str, value: Any, modules: Mapping[str, dict[str, Any]]) -> tuple[str, list[list[str]]]:
    """Names of the parameters of each group, and the module that has them."""
    rows = [list(group.get("param_names") or group["params"]) for group in value["param_groups"]]
    flat = [one for row in rows for one in row]
    if all(isinstance(one, str) for one in flat):
        owner = next((module for module, entries in modules.items() if entries.keys() >= set(flat)), None)
        if owner is None:
            raise UsageError(
                f"no module has the parameters of {key}: {', '.join(flat[:4])}",
                mend="import the model with it, under its own names, as in --as model=module",
            )
        return owner, rows
    for owner, entries in modules.items():
        names = _by_number(entries, value["state"], flat)
        if names is not None:
            return owner, [[names[one] for one in row] for row in rows]
    raise UsageError(
        f"{key} numbers its {len(flat)} parameters, and no module's tensors can be told to be these",
        mend="save it by name (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or import the model "
        "alone with --as",
    )


def _by_number(entries: Mapping[str, Any], state: Mapping[Any, Any], numbers: Sequence[int]) -> dict[int, str] | None:
    """Names of numbered parameters: all tensors but the buffers of torch's own layers, in order; None if in doubt."""
    seen: set[object] = set()
    names = []
    for name, entry in entries.items():
        memory = (entry.untyped_storage()._cdata, entry.storage_offset(), entry.shape)
        if name.rpartition(".")[2] not in _BUFFERS and entry.dtype.is_floating_point and memory not in seen:
            names.append(name)
        seen.add(memory)
    if sorted(numbers) != list(range(len(names))):
        return None
    for number, name in enumerate(names):
        of = state.get(number, state.get(str(number), {}))
        shapes = [entry.shape for entry in of.values() if isinstance(entry, torch.Tensor) and entry.numel() > 1]
        if shapes and entries[name].shape not in shapes:
            return None
    return dict(enumerate(names))


@dataclass(frozen=True, kw_only=True)
class Spool(saved.Save):
    """A save of one rank, as if the run itself had made it.

    Attributes:
        run_id: Run.
    """

    run_id: str

    @property
    def run(self) -> RunInfo:
        """See Save."""
        return RunInfo(run_id=self.run_id, job_id=super().run.job_id, attempt=ATTEMPT, cycle=0, world_size=1, nodes=1)


def taken_apart(state: Mapping[str, object]) -> Flat:
    """Take a state that was made here apart.

    Raises:
        StateError: Something in it cannot be stored; names its path.
    """
    flat = flatten(state, meta=True)
    _home(flat.values)
    return flat


def _home(node: Any) -> None:
    """Tensors that are yet to be read are of the host."""
    if isinstance(node, dict):
        if node.get("device") == "meta":
            del node["device"]
        for value in node.values():
            _home(value)
    elif isinstance(node, list):
        for value in node:
            _home(value)


def write(directory: str, foreign: Foreign, flat: Flat, *, run_id: str, iteration: int) -> tuple[str, ShardManifest]:
    """Write a state as one sealed shard. Memory: one tensor at a time.

    Args:
        directory: Where to, an empty directory.
        foreign: Where its tensors come from.
        flat: The state.
        run_id: Run that it is for.
        iteration: Iteration that it is of.

    Returns:
        Directory in the layout of a job's directory, and the manifest.

    Raises:
        SpaceError: Storage is full or read-only.
        DataError: The foreign checkpoint is damaged.
        OSError: The file system refused otherwise.
    """
    started = time.perf_counter()
    token = f"{time.time_ns():016x}"
    spool = Spool(root=directory, kind="save", iteration=iteration, token=token, world_size=1, run_id=run_id)
    spool.make()

    def read(index: int) -> memoryview:
        origin, item = flat.origins[index], flat.items[index]
        found = foreign.read(origin)
        source = flat.sources[index] if found is origin else found
        data = raw_bytes(source)
        if data.nbytes != item.nbytes:
            raise StateError(f"{item.name} was read as {data.nbytes} bytes, {item.nbytes} are right")
        return data

    name, generation, offsets = saved.write_slot(spool, 0, [slot_spec(item) for item in flat.items], read)
    items = tuple(slot_items(flat, offsets))
    draft = saved.draft(spool, 0, items, flat.values, (name, generation), {"copy": time.perf_counter() - started})
    return spool.path, saved.seal_slot(spool, draft)
