"""The plan of a restore: first everything is compared, then verified, then prepared, and only then changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from slurm_resil.ckpt import dtypes, meta, plain, sharding, views
from slurm_resil.ckpt import state as states
from slurm_resil.ckpt.options import LoadOptions, LoadReport, listed
from slurm_resil.ckpt.plain import Path, where
from slurm_resil.ckpt.selection import Amount, Selection, leaves, live_leaves
from slurm_resil.ckpt.source import Source, Want, fresh
from slurm_resil.ckpt.state import Array, Sharded
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout

Step = Callable[[], None]
Late = Callable[[], torch.Tensor]  # a place that has no memory yet
Like = Callable[[dict[str, Any], Path], torch.Tensor | None]  # an empty tensor for a node; None for the default

EXACT = LoadOptions()
ITEM_KINDS = ("tensor", "ndarray", "bytes")
GENERATOR_KINDS = ("torch.Generator", "numpy.random.Generator", "numpy.random.RandomState", "random.Random")
KEEP_KINDS = ("keep",)  # see ckpt.private
PAIR_KINDS = (*plain.DICT_KINDS, "dataclass", "namespace")
OBJECT_KINDS = ("module", "optimizer", "stateful", "sharded")  # exist in the state or nowhere


def kind_of(node: Any) -> str:
    """Kind of a node."""
    if isinstance(node, dict):
        return str(node.get("$"))
    return "list" if isinstance(node, list) else "value"


def holds(node: Any, kinds: Sequence[str]) -> bool:
    """Whether a node is or contains one of some kinds."""
    if isinstance(node, dict):
        kind = node.get("$")
        if kind == "tensor" or kind in kinds:
            return kind in kinds  # nothing is inside a tensor, and there are many
        return any(holds(entry, kinds) for entry in node.values())
    return isinstance(node, list) and any(holds(entry, kinds) for entry in node)


class Plan:
    """What a restore will do.

    Args:
        source: Gives the items.
        values: What was stored, as ``flatten`` made it.
        options: What may differ.
        parameters: Path of every parameter of the state, by identity.

    Attributes:
        faults: What does not fit, for a person.
        report: What will be left as it is, or converted.
        wants: What will be read.
        making: Tensors that will get memory.
        early: The user's code, which may raise; before everything else that changes the state.
        copies: Everything that cannot fail any more; after what is filled in place.
        late: What needs the copies to be done.
    """

    def __init__(
        self, source: Source, values: Any, options: LoadOptions = EXACT, parameters: Mapping[int, Path] | None = None
    ) -> None:
        self.source, self.options, self.parameters = source, options, parameters or {}
        self.selection, self.report, self.making = Selection(options), LoadReport(), meta.Making(options.device)
        self.faults: list[str] = []
        self.wants: list[Want] = []
        self._prepare: list[Step] = []
        self.early: list[Step] = []
        self.copies: list[Step] = []
        self.late: list[Step] = []
        self._values, self._storages = values, views.Storages()
        self._fills: list[tuple[Want, torch.Tensor | Array | Late]] = []
        self._places: dict[object, str] = {}  # memory -> item that goes there
        self._spared: dict[object, Path] = {}  # memory -> what is left out, and has it
        self._needed: list[tuple[torch.Tensor, Path]] = []  # will be asked for its device
        self._made: dict[object, Any] = {}  # item and type -> what was made of it, so that shared ones stay shared

    def differ(self, path: Path, text: str) -> None:
        """Note that something does not fit."""
        self.faults.append(f"{where(path)}: {text}")

    def expect(self, node: Any, kind: str, path: Path) -> bool:
        """Note a difference unless a node is of a kind."""
        found = kind_of(node)
        if found != kind:
            self.differ(path, f"a {found} in the checkpoint, a {kind} in the state")
        return found == kind

    # -- what is left as it is

    def amount(self, node: Any, path: Path) -> Amount:
        """How much of a node is to be loaded."""
        return "all" if self.selection.all else self.selection.amount(leaves(node, path))

    def leaves_out(self, node: Any, path: Path, live: object = None) -> bool:
        """Whether nothing of a node is to be loaded; notes it."""
        if holds(node, KEEP_KINDS):
            self.report.kept.append(where(path))
        elif self.amount(node, path) == "none":
            self._skip(path, live)
        else:
            return False
        return True

    def _skip(self, path: Path, live: object) -> None:
        self.report.skipped.append(where(path))
        for tensor in states.tensors_in(live):
            if (memory := states.memory_key(tensor)) is not None:
                self._spared[memory] = path

    def missing(self, path: Path, live: object = None, text: str = "is in the state, not in the checkpoint") -> None:
        """Note what is in the state alone."""
        if self.selection.amount(live_leaves(live, path, self.parameters)) == "none":
            self._skip(path, live)
        elif self.options.allow_missing:
            self.report.missing.append(where(path))
        else:
            self.differ(path, text)

    def unexpected(self, path: Path, node: Any) -> None:
        """Note what is in the checkpoint alone."""
        if self.amount(node, path) == "none":
            self.report.skipped.append(where(path))
        elif self.options.allow_unexpected:
            self.report.unexpected.append(where(path))
        else:
            self.differ(path, "is in the checkpoint, not in the state")

    def need(self, parameter: torch.Tensor, path: Path) -> None:
        """Note that something is made like a parameter, which must have memory by then."""
        if meta.is_meta(parameter):
            self._needed.append((parameter, path))

    def refuse(self) -> None:
        """Raise if anything does not fit.

        Raises:
            StateError: Lists the first few differences.
        """
        for pattern in self.selection.unused():
            self.faults.append(f"the pattern {pattern!r} matches nothing that can be loaded by itself")
        for memory in self._spared.keys() & self._places.keys():
            self.differ(self._spared[memory], f"is left out, but is the same memory as {self._places[memory]}")
        for parameter, path in self._needed:
            if parameter not in self.making:
                self.differ(path, "belongs to a parameter on the meta device that is not restored")
        if self.faults:
            raise StateError(
                f"the state does not fit the checkpoint: {listed(self.faults, '; ')}",
                mend="restore into a state of the same shape, or say in LoadOptions what may differ; "
                "a run that shall start afresh needs another id",
                differences=len(self.faults),
            )

    def run(self) -> None:
        """Make what is new, then change the state."""
        self.making.allocate()
        for steps in (self._prepare, self.early, [self.making.swap, self._fill_all], self.copies, self.late):
            for step in steps:
                step()

    # -- into memory that is there

    def tensor(self, live: torch.Tensor, node: Any, path: Path, *, sharded: Sharded | None = None) -> None:
        """Compare a tensor of the state with a node, to be filled in place."""
        if not self.expect(node, "tensor", path):
            return
        states.check_tensor(live, path, meta=True)
        here = where(path)
        dtype = dtypes.torch_name(live.dtype, here)
        if sharded is None:
            part = sharding.part_of(live, here)
        else:
            shape, extents = tuple(sharded.global_shape), tuple(sharded.extents)
            part = sharding.Part(local=live.detach(), global_shape=shape, extents=extents, whole=False)
        made_late = part.local.is_meta
        if made_late and (fault := self.making.add(live, node.get("device", "cpu"))):
            self.differ(path, fault)
        local = states.compact(part.local) if part.whole else part.local

        def made() -> torch.Tensor:
            now = sharding.part_of(live, here).local
            return states.compact(now) if part.whole else now

        stored, full = tuple(node["shape"]), tuple(node.get("expanded", node["shape"]))
        if not part.whole:
            want = self.want(node, dtype, tuple(local.shape), part.global_shape, here, part.extents)
            self._fill(want, local, path, made if made_late else None)
        elif live.shape != full:
            self.differ(path, f"shape {full} in the checkpoint, {tuple(live.shape)} in the state")
        elif local.shape == stored:
            self._fill(self.want(node, dtype, stored, stored, here), local, path, made if made_late else None)
        elif local.shape == full:  # expanded when it was saved, dense now
            want = self.want(node, dtype, stored, stored, here)
            self.copies.append(lambda: self._spread(want, made() if made_late else local))
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
            here = where(path)
            dtype = dtypes.numpy_name(live.dtype, here)
            self._fill(self.want(node, dtype, live.shape, live.shape, here), live, path)

    def _fill(self, want: Want, place: torch.Tensor | Array, path: Path, late: Late | None = None) -> None:
        memory = states.memory_key(place)
        if memory is not None:
            other = self._places.get(memory)
            if other == want.name:
                return  # tied, and filled once already
            if other is not None:
                self.differ(path, f"is the same memory as {other} in the state, but not in the checkpoint")
            self._places[memory] = want.name
        self._fills.append((want, late or place))

    def _fill_all(self) -> None:
        exact: list[tuple[Want, torch.Tensor | Array]] = []
        for want, place in self._fills:
            target = place if isinstance(place, torch.Tensor | np.ndarray) else place()
            if dtypes.name_of(target, want.where) == want.dtype:
                exact.append((want, target))
            else:
                self._put(want, target)
        self.source.fill_all(exact)

    def _put(self, want: Want, target: torch.Tensor | Array) -> None:
        assert isinstance(target, np.ndarray) or not target.is_meta, f"{want.where}: what goes there would be lost"
        if dtypes.name_of(target, want.where) == want.dtype:
            self.source.fill(want, target)
            return
        one = fresh(want.dtype, want.local_shape, want.where)
        self.source.fill(want, one)
        if isinstance(target, torch.Tensor) and isinstance(one, torch.Tensor):
            with torch.no_grad():
                target.copy_(one)
        elif isinstance(target, np.ndarray) and isinstance(one, np.ndarray):
            np.copyto(target, one, casting="same_kind")

    def _spread(self, want: Want, target: torch.Tensor) -> None:
        one = fresh(want.dtype, want.local_shape, want.where)
        self.source.fill(want, one)
        assert isinstance(one, torch.Tensor)
        with torch.no_grad():
            target.copy_(one.expand(target.shape))

    def want(
        self, node: Any, dtype: str, local: Any, shape: Any, here: str, extents: tuple[Any, ...] | None = None
    ) -> Want:
        """Note what will be read, for the place that people call ``here``; without ``extents`` it is the whole."""
        stored = node.get("dtype", "bytes")
        if self.options.cast and dtype != stored and dtypes.can_cast(stored, dtype):
            self.report.cast.append(f"{here} ({stored} to {dtype})")
            dtype = stored
        want = Want(
            name=node["item"],
            dtype=dtype,
            local_shape=tuple(local),
            global_shape=tuple(shape),
            extents=extents or (),
            whole=extents is None,
            where=here,
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
        """Note all items below a node; paths are those that :meth:`_decode` gives them."""
        kind, of = kind_of(node), node.get("of") if isinstance(node, dict) else node
        if kind in ITEM_KINDS and "item" in node:
            self._note_item(node, path, like)
        elif kind in GENERATOR_KINDS:
            self._note(of, path, like)
        elif kind in PAIR_KINDS:
            for key, entry in node["of"]:
                self._note(entry, (*path, plain.decode_key(key, path)), like)
        elif isinstance(of, list):
            for index, entry in enumerate(of):
                self._note(entry, (*path, str(index)), like)

    def _note_item(self, node: dict[str, Any], path: Path, like: Like | None) -> None:
        shape = tuple(node["shape"])
        made = like(node, path) if like is not None and node["$"] == "tensor" else None
        if made is not None:
            part = sharding.part_of(made, where(path))
            extents = None if part.whole else part.extents
            dtype = dtypes.torch_name(made.dtype, where(path))
            self.want(node, dtype, part.local.shape, part.global_shape, where(path), extents)
        elif node.get("sharded"):
            self.differ(path, "is sharded in the checkpoint, and nothing in the state says how to shard it now")
        else:
            self.want(node, node.get("dtype", "bytes"), shape, shape, where(path))

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
        made = like(node, path) if like is not None and node["$"] == "tensor" else None
        key = (node["item"], None if made is None else made.dtype)
        if key not in self._made:
            self._made[key] = self._made_new(node, path, made)
        found = self._made[key]
        if not isinstance(found, torch.Tensor):
            return found
        dress = (*key, str(node.get("expanded")), node.get("class"), node.get("requires_grad"))
        if dress not in self._made:
            self._made[dress] = views.dressed(found, node, path)
        return self._made[dress]

    def _made_new(self, node: dict[str, Any], path: Path, made: torch.Tensor | Array | None) -> Any:
        dtype, shape = node.get("dtype", "bytes"), tuple(node["shape"])
        device = "cuda" if node.get("device") == "cuda" and torch.cuda.is_available() else "cpu"
        target = made
        if made is None and "view" in node:
            made = self._storages.view(node, dtypes.torch_dtype(dtype, where(path)), device)
            target = states.compact(made)
        elif made is None:
            made = target = fresh(dtype, shape, where(path), node.get("fields"))
            if isinstance(made, torch.Tensor):
                made = target = made.to(device)
        part = sharding.part_of(target, where(path)) if isinstance(target, torch.Tensor) else None
        want = Want(
            name=node["item"],
            dtype=dtype,
            local_shape=tuple(part.local.shape) if part else shape,
            global_shape=part.global_shape if part else shape,
            extents=part.extents if part else (),
            whole=part.whole if part else True,
            where=where(path),
        )
        if node["$"] == "bytes":
            self.source.fill(want, made)
            return made.tobytes() if isinstance(made, np.ndarray) else made
        self._put(want, part.local if part else made)
        return made

    # -- what is known of the checkpoint

    @cached_property
    def parameter_dtypes(self) -> Mapping[str, str]:
        """Type of every entry of every module in the checkpoint, by the name that its optimizer knows it by."""
        found: dict[str, str] = {}
        stack: list[tuple[Any, Path]] = [(self._values, ())]
        while stack:
            node, path = stack.pop()
            if kind_of(node) == "module":
                entries = ((name, entry) for name, entry in node["of"] if kind_of(entry) == "tensor")
                found.update({layout.join(*path, name): entry["dtype"] for name, entry in entries})
            elif kind_of(node) in PAIR_KINDS:
                stack += [(entry, (*path, plain.decode_key(key, path))) for key, entry in node["of"]]
            elif kind_of(node) in ("list", "tuple", "namedtuple"):
                of = node if isinstance(node, list) else node["of"]
                stack += [(entry, (*path, str(index))) for index, entry in enumerate(of)]
        return found


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
