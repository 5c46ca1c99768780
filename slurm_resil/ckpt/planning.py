"""The plan of a restore: first everything is compared, then verified, then prepared, and only then changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slurm_resil.ckpt import dtypes, plain, sharding
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.source import Source, Want, fresh
from slurm_resil.ckpt.state import Array, Sharded
from slurm_resil.core.errors import StateError

Step = Callable[[], None]
Like = Callable[[dict[str, Any], Path], torch.Tensor | None]  # an empty tensor for a node; None for the default

SHOWN = 5  # differences that an error lists
ITEM_KINDS = ("tensor", "ndarray", "bytes")
GENERATOR_KINDS = ("torch.Generator", "numpy.random.Generator", "numpy.random.RandomState", "random.Random")
KEEP_KINDS = ("keep",)  # see ckpt.private
OBJECT_KINDS = ("module", "optimizer", "stateful", "sharded")  # exist in the state or nowhere


def kind_of(node: Any) -> str:
    """Kind of a node."""
    if isinstance(node, dict):
        return str(node.get("$"))
    return "list" if isinstance(node, list) else "value"


def holds(node: Any, kinds: Sequence[str]) -> bool:
    """Whether a node is or contains one of some kinds."""
    if isinstance(node, dict):
        return node.get("$") in kinds or any(holds(entry, kinds) for entry in node.values())
    return isinstance(node, list) and any(holds(entry, kinds) for entry in node)


class Plan:
    """What a restore will do.

    Attributes:
        faults: What does not fit, for a person.
        wants: What will be read.
        early: The user's code, which may raise; before everything else that changes the state.
        copies: Everything that cannot fail any more.
        late: What needs the copies to be done.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.faults: list[str] = []
        self.wants: list[Want] = []
        self._prepare: list[Step] = []
        self.early: list[Step] = []
        self.copies: list[Step] = []
        self.late: list[Step] = []
        self._places: dict[object, str] = {}  # memory -> item that goes there
        self._made: dict[str, Any] = {}  # item -> what was made of it, so that shared ones stay shared

    def differ(self, path: Path, text: str) -> None:
        """Note that something does not fit."""
        self.faults.append(f"{where(path)}: {text}")

    def expect(self, node: Any, kind: str, path: Path) -> bool:
        """Note a difference unless a node is of a kind."""
        found = kind_of(node)
        if found != kind:
            self.differ(path, f"a {found} in the checkpoint, a {kind} in the state")
        return found == kind

    def refuse(self) -> None:
        """Raise if anything does not fit.

        Raises:
            StateError: Lists the first few differences.
        """
        if self.faults:
            more = f"; and {len(self.faults) - SHOWN} more" if len(self.faults) > SHOWN else ""
            raise StateError(
                f"the state does not fit the checkpoint: {'; '.join(self.faults[:SHOWN])}{more}",
                mend="restore into a state of the same shape, or give the run another id to start afresh",
                differences=len(self.faults),
            )

    def run(self) -> None:
        """Make what is new, then change the state."""
        for steps in (self._prepare, self.early, self.copies, self.late):
            for step in steps:
                step()

    # -- into memory that is there

    def tensor(self, live: torch.Tensor, node: Any, path: Path, *, sharded: Sharded | None = None) -> None:
        """Compare a tensor of the state with a node, to be filled in place."""
        if not self.expect(node, "tensor", path):
            return
        states.check_tensor(live, path)
        dtype = dtypes.torch_name(live.dtype, where(path))
        if sharded is None:
            part = sharding.part_of(live, where(path))
        else:
            shape, extents = tuple(sharded.global_shape), tuple(sharded.extents)
            part = sharding.Part(local=live.detach(), global_shape=shape, extents=extents, whole=False)
        if not part.whole:
            want = self.want(node, dtype, tuple(part.local.shape), part.global_shape, path, part.extents)
            self._fill(want, part.local, path)
            return
        stored, full = tuple(node["shape"]), tuple(node.get("expanded", node["shape"]))
        local = states.compact(part.local)
        if tuple(live.shape) != full:
            self.differ(path, f"shape {full} in the checkpoint, {tuple(live.shape)} in the state")
        elif tuple(local.shape) == stored:
            self._fill(self.want(node, dtype, stored, stored, path), local, path)
        elif tuple(local.shape) == full:  # expanded when it was saved, dense now
            want = self.want(node, dtype, stored, stored, path)
            self.copies.append(lambda: self._spread(want, local))
        else:
            self.differ(path, "is expanded in the state, not in the checkpoint")

    def array(self, live: Array, node: Any, path: Path) -> None:
        """Compare an array of the state with a node, to be filled in place."""
        if not self.expect(node, "ndarray", path):
            return
        fields = dtypes.fields_of(live.dtype)
        if node.get("fields") != fields:
            self.differ(path, f"fields {node.get('fields')} in the checkpoint, {fields} in the state")
        elif not live.flags.writeable:
            self.differ(path, "is a read-only array in the state")
        else:
            dtype = dtypes.numpy_name(live.dtype, where(path))
            self._fill(self.want(node, dtype, live.shape, live.shape, path), live, path)

    def _fill(self, want: Want, target: torch.Tensor | Array, path: Path) -> None:
        memory = states.memory_key(target)
        if memory is not None:
            other = self._places.get(memory)
            if other == want.name:
                return  # tied, and filled once already
            if other is not None:
                self.differ(path, f"is the same memory as {other} in the state, but not in the checkpoint")
            self._places[memory] = want.name
        self.copies.append(lambda: self.source.fill(want, target))

    def _spread(self, want: Want, target: torch.Tensor) -> None:
        one = fresh(want.dtype, want.local_shape, want.where)
        self.source.fill(want, one)
        assert isinstance(one, torch.Tensor)
        with torch.no_grad():
            target.copy_(one.expand(target.shape))

    def want(
        self, node: Any, dtype: str, local: Any, shape: Any, path: Path, extents: tuple[Any, ...] | None = None
    ) -> Want:
        """Note what will be read; without ``extents`` it is the whole."""
        want = Want(
            name=node["item"],
            dtype=dtype,
            local_shape=tuple(local),
            global_shape=tuple(shape),
            extents=extents or (),
            whole=extents is None,
            where=where(path),
        )
        if fault := self.source.misfit(want):
            self.faults.append(fault)
        else:
            self.wants.append(want)
        return want

    # -- new values

    def decoding(self, node: Any, path: Path, live: object = None, like: Like | None = None) -> Callable[[], Any]:
        """Plan to rebuild a value that is not filled in place.

        Args:
            node: What to rebuild.
            path: Where it goes.
            live: What is there now, which helps to find classes.
            like: Makes the tensor to fill for a tensor node, where it cannot be an ordinary one.

        Returns:
            Gives the value once the plan runs.
        """
        if holds(node, OBJECT_KINDS):
            self.differ(path, "an object in the checkpoint, which is not in the state")
        else:
            self._note(node, path, like)
        box: list[Any] = []
        self._prepare.append(lambda: box.append(self._decode(node, path, live, like)))
        return lambda: box[0]

    def _note(self, node: Any, path: Path, like: Like | None) -> None:
        """Note all items below a node."""
        if isinstance(node, list):
            for entry in node:
                self._note(entry, path, like)
        elif isinstance(node, dict):
            if node.get("$") in ITEM_KINDS and "item" in node:
                self._note_item(node, path, like)
            for entry in node.values():
                if isinstance(entry, dict | list):
                    self._note(entry, path, like)

    def _note_item(self, node: dict[str, Any], path: Path, like: Like | None) -> None:
        shape = tuple(node["shape"])
        made = like(node, path) if like is not None and node["$"] == "tensor" else None
        if made is not None:
            part = sharding.part_of(made, where(path))
            extents = None if part.whole else part.extents
            self.want(node, node["dtype"], part.local.shape, part.global_shape, path, extents)
        elif node.get("sharded"):
            self.differ(path, "is sharded in the checkpoint, and nothing in the state says how to shard it now")
        else:
            self.want(node, node.get("dtype", "bytes"), shape, shape, path)

    def _decode(self, node: Any, path: Path, live: object, like: Like | None) -> Any:
        kind = kind_of(node)
        if kind in ITEM_KINDS and "item" in node:
            return self._make(node, path, like)
        if kind in GENERATOR_KINDS:
            return new_generator(node, self._decode(node["of"], path, None, like), path)

        def child(entry: object, at: Path) -> Any:
            return self._decode(entry, at, None, like)

        return plain.decode(node, path, child, live)

    def _make(self, node: dict[str, Any], path: Path, like: Like | None) -> Any:
        name = node["item"]
        if name not in self._made:
            self._made[name] = self._made_new(node, path, like)
        made = self._made[name]
        return made.expand(tuple(node["expanded"])) if "expanded" in node else made

    def _made_new(self, node: dict[str, Any], path: Path, like: Like | None) -> Any:
        dtype, shape = node.get("dtype", "bytes"), tuple(node["shape"])
        made: torch.Tensor | Array | None = like(node, path) if like is not None and node["$"] == "tensor" else None
        if made is None:
            made = fresh(dtype, shape, where(path), node.get("fields"))
            if node.get("device") == "cuda" and torch.cuda.is_available() and isinstance(made, torch.Tensor):
                made = made.to("cuda")
        part = sharding.part_of(made, where(path)) if isinstance(made, torch.Tensor) else None
        want = Want(
            name=node["item"],
            dtype=dtype,
            local_shape=tuple(part.local.shape) if part else shape,
            global_shape=part.global_shape if part else shape,
            extents=part.extents if part else (),
            whole=part.whole if part else True,
            where=where(path),
        )
        self.source.fill(want, part.local if part else made)
        return made.tobytes() if node["$"] == "bytes" and isinstance(made, np.ndarray) else made


def new_generator(node: dict[str, Any], value: Any, path: Path) -> Any:
    """Make a random generator from its stored state.

    Raises:
        StateError: This numpy does not have it.
    """
    kind = node["$"]
    if kind == "torch.Generator":
        made = torch.Generator(node["device"])
        made.set_state(value.cpu())
        return made
    if kind == "random.Random":
        python = random.Random()  # noqa: S311 -- a generator of the user, not a secret
        python.setstate(value)
        return python
    if kind == "numpy.random.RandomState":
        legacy = np.random.RandomState()
        legacy.set_state(value)
        return legacy
    type_ = getattr(np.random, node["class"], None)
    if not (isinstance(type_, type) and issubclass(type_, np.random.BitGenerator)):
        raise StateError(f"{where(path)}: this numpy has no generator {node['class']}")
    bits = type_()
    bits.state = value
    return np.random.Generator(bits)
