"""What a save found out about a state, so that the next one only looks whether it is still so.

Most of a state is parameters and the optimizer's tensors: thousands of objects whose names, types and places stay what
they are. A segment is such a part. It is used again if every object in it is the very same one, at the same address,
with the same type, shape and strides; whatever else a state holds is looked at anew each time. One segment that is not
as it was makes the whole state be taken apart afresh: what is shared between parts is never guessed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slurm_resil.ckpt.flat import FlatItem

MISSES = 4  # in a row: a part that changes all the time is not worth a look
OF_MODULES = ("names", "state")
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_Print = tuple[weakref.ref[torch.Tensor], int, torch.Size, tuple[int, ...], torch.dtype, Any]


class ChangedError(Exception):
    """A segment is not what it was."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(key)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a state.

    Attributes:
        keys: What else must be as it was, in order: names of the tensors, plain values among them.
        prints: What to look at in each tensor.
        node: The part as JSON; the same object as long as nothing changes.
        items: Items that it added.
        picks: Tensor that each item is.
        names: Memory that it was the first to have, and the items.
    """

    keys: Sequence[object]
    prints: Sequence[_Print]
    node: Any
    items: tuple[FlatItem, ...]
    picks: tuple[int, ...]
    names: Mapping[object, str]

    def sources(
        self, keys: Sequence[object], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The memory of each item now, and the tensor that has it; None if anything is not as it was."""
        if len(tensors) != len(self.prints) or keys != self.keys:
            return None
        locals_: list[torch.Tensor] = []
        for tensor, (ref, address, shape, stride, dtype, spec) in zip(tensors, self.prints, strict=True):
            local = tensor
            if spec is not None:
                now = getattr(tensor, "_spec", None)
                if now is not spec and now != spec:
                    return None
                local = tensor._local_tensor  # type: ignore[attr-defined] # of a DTensor
            if (
                ref() is not tensor
                or local.data_ptr() != address
                or local.dtype is not dtype
                or local.shape != shape
                or local.stride() != stride
            ):
                return None
            locals_.append(local)
        return [locals_[index] for index in self.picks], [tensors[index] for index in self.picks]


@dataclass
class Memo:
    """Segments of one state, from save to save.

    Attributes:
        segments: By what they are called; None for a part that has to be looked at each time.
        items: All items of the state.
        nodes: All segments' nodes, in order; the same object as long as nothing changes.
        replaying: Whether segments are used now, rather than written down.
    """

    segments: dict[Hashable, Segment | None] = field(default_factory=dict)
    items: tuple[FlatItem, ...] = ()
    nodes: tuple[Any, ...] = ()
    replaying: bool = False
    _sound: bool = True  # every module is a segment
    _missed: dict[Hashable, int] = field(default_factory=dict)

    def begin(self, *, replay: bool) -> None:
        """Begin to take a state apart."""
        self.replaying = replay
        if not replay:
            self.segments, self._sound = {}, True

    def unsound(self, key: Hashable) -> None:
        """Say that a module is no segment: its parameters may be called otherwise without being seen.

        Raises:
            ChangedError: It was one.
        """
        if self.segments.get(key) is not None:
            raise ChangedError(key)
        self.segments[key] = None
        self._sound = False

    def changed(self, key: Hashable) -> None:
        """Count a segment that was not as it had been."""
        self._missed[key] = self._missed.get(key, 0) + 1

    def wanted(self, key: Hashable) -> bool:
        """Whether a part may become a segment."""
        return self._missed.get(key, 0) < MISSES

    def end(self, items: tuple[FlatItem, ...]) -> tuple[FlatItem, ...]:
        """A state was taken apart; returns its items, the very ones of the last time if they are equal."""
        if self.replaying:
            self._missed.clear()
        else:
            if not self._sound:  # what an optimizer's tensors are called depends on the modules, also on later ones
                for key in self.segments:
                    if isinstance(key, tuple) and key[0] in OF_MODULES:
                        self.segments[key] = None
            self.nodes = tuple(entry.node for entry in self.segments.values() if entry is not None)
        if items != self.items:
            self.items = items
        return self.items


def fingerprint(tensor: torch.Tensor) -> _Print | None:
    """What to look at in a tensor; None if that would not tell all that matters."""
    if tensor.is_complex() or tensor.is_neg():  # the bits that say so may change without a trace
        return None
    if isinstance(tensor, DTensor):
        local, spec = tensor._local_tensor, tensor._spec
        if type(local) is not torch.Tensor:
            return None
    elif type(tensor) in _PLAIN:
        local, spec = tensor, None
    else:
        return None
    return (weakref.ref(tensor), local.data_ptr(), local.shape, local.stride(), local.dtype, spec)
