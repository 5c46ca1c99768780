"""Which parts of a state and of a checkpoint the patterns of a restore take; see :mod:`slurm_resil.ckpt.options`."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from slurm_resil.ckpt import plain
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.format import layout

_PAIRS = (*plain.DICT_KINDS, "dataclass")
_LISTS = ("tuple", "namedtuple")
Amount = Literal["all", "some", "none"]


class Selection:
    """Which paths the patterns take.

    Attributes:
        all: There are no patterns.
    """

    def __init__(self, options: LoadOptions) -> None:
        self._include, self._exclude = (
            [(pattern, _compiled(pattern)) for pattern in patterns] for patterns in (options.include, options.exclude)
        )
        self._unused = {*options.include, *options.exclude}
        self.all = not self._unused

    def takes(self, path: Path) -> bool:
        """Whether something that can only be loaded as a whole is to be loaded."""
        text = where(path)
        for pattern, matches in (*self._include, *self._exclude):
            if pattern in self._unused and matches(text):
                self._unused.discard(pattern)
        taken = not self._include or any(matches(text) for _, matches in self._include)
        return taken and not any(matches(text) for _, matches in self._exclude)

    def amount(self, leaves: Iterable[Path]) -> Amount:
        """How much is taken of something, by the leaves that it has."""
        if self.all:
            return "all"
        found = {self.takes(path) for path in leaves}
        return "some" if len(found) == 2 else "none" if found == {False} else "all"

    def unused(self) -> list[str]:
        """Patterns that nothing has matched so far."""
        return sorted(self._unused)


def _compiled(pattern: str) -> Callable[[str], object]:
    """What says whether a pattern matches a path, or anything above it."""
    return re.compile(f"{fnmatch.translate(pattern)}|{fnmatch.translate(f'{pattern}/*')}").match


def leaves(node: Any, path: Path) -> Iterator[Path]:
    """Paths of everything in a node that can be loaded without its neighbours."""
    kind = node.get("$") if isinstance(node, dict) else None
    if kind == "module":
        yield from ((*path, name) for name, _ in node["of"])
    elif kind == "optimizer":
        for index, group in enumerate(node["groups"]):
            yield from ((*path, "groups", str(index), plain.decode_key(key, path)) for key, _ in group["of"])
        yield from ((*path, "state", name) for name, _ in node["state"])
        yield from ((*path, "other", plain.decode_key(key, path)) for key, _ in node["other"])
    elif kind in _PAIRS and node["of"]:
        for key, entry in node["of"]:
            yield from leaves(entry, (*path, plain.decode_key(key, path)))
    elif isinstance(entries := node["of"] if kind in _LISTS else node, list) and entries:
        for index, entry in enumerate(entries):
            yield from leaves(entry, (*path, str(index)))
    else:
        yield path


def live_leaves(live: Any, path: Path, parameters: Mapping[int, Path]) -> Iterator[Path]:
    """As :func:`leaves`, for a value of the state; an optimizer has the state of every parameter, present or not."""
    if isinstance(live, nn.Module):
        yield from ((*path, name) for name in states.module_entries(live, path))
    elif isinstance(live, torch.optim.Optimizer) and states.is_plain_optimizer(live):
        for index, group in enumerate(live.param_groups):
            yield from ((*path, "groups", str(index), key) for key in group if key != "params")
        for row in states.optimizer_names(live, parameters):
            yield from ((*path, "state", layout.join(*name)) for name in row)
    elif states.is_stateful(live):
        yield path
    elif isinstance(live, Mapping) and live:
        for key, entry in live.items():
            yield from live_leaves(entry, (*path, key), parameters)
    elif isinstance(live, list | tuple) and live:
        for index, entry in enumerate(live):
            yield from live_leaves(entry, (*path, str(index)), parameters)
    elif dataclasses.is_dataclass(live) and not isinstance(live, type | states.Sharded):
        for entry in dataclasses.fields(live):
            yield from live_leaves(getattr(live, entry.name), (*path, entry.name), parameters)
    else:
        yield path
