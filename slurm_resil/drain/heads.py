"""What the nodes of a job that is gone tell each other, through files in the run's directory.

Directory ``late/<job id>-<attempt>/``; every file is published by rename and carries a hash of itself::

    heads-<node>.json       the shards that the node has, without their data: what planning needs
    chosen.json             which checkpoint becomes durable, and the nodes that hold it; the first one counts
    written-<mover>.json    all that this node had to write is on storage
    verified-<share>.json   one share of the file as it was read back
    failed.json             why nothing comes of it; whoever tries again begins anew

A mover is a node of ``chosen.json``, by its place there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.log import now_s
from slurm_resil.drain import publishing
from slurm_resil.drain.plan import Head
from slurm_resil.drain.planning import item_of, row
from slurm_resil.drain.shards import items_of
from slurm_resil.format.manifest import Document, Item, ShardManifest
from slurm_resil.format.sealed import Found

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_HEADS = re.compile(r"^heads-(.+)\.json$")
_COUNTED = re.compile(r"^(written|verified)-(\d{6,})\.json$")
_TRIES = 8  # at writing into a directory that others clear
D = TypeVar("D", bound=Document)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A shard without its data.

    Attributes:
        found: What is needed to choose; its mover is that of the whole list of nodes.
        iteration: Which it is of.
        node: Node that holds it.
        metrics: What the training said of the state.
        seal: Hash of what it holds.
        items: Its items, the values among them, without the hashes of their blocks.
    """

    found: Found
    iteration: int
    node: str
    metrics: dict[str, float]
    seal: str
    items: tuple[Item, ...]

    def head(self, mover: int) -> Head:
        """Its head in a plan."""
        one = self.found
        return Head(
            mover=mover,
            node=self.node,
            run_id=one.run_id,
            job_id=one.job_id,
            attempt=one.attempt,
            iteration=self.iteration,
            rank=one.rank,
            world_size=one.world_size,
            metrics=self.metrics,
        )


@dataclass(frozen=True, kw_only=True)
class Heads(Document):
    """The shards of a node.

    Attributes:
        node: Its name.
        shards: Rows of :func:`_packed`.
        flaws: What is wrong with shards that are not among them.
    """

    node: str
    shards: tuple[Any, ...]
    flaws: tuple[str, ...] = ()

    @classmethod
    def of(cls, node: str, manifests: Sequence[ShardManifest], flaws: Sequence[str]) -> Self:
        """Make them of manifests."""
        return cls(node=node, shards=tuple(_packed(one) for one in manifests), flaws=tuple(flaws))

    def shown(self, mover: int) -> list[Shown]:
        """The shards; ``mover`` is put into what is found.

        Raises:
            DataError: They are none.
        """
        try:
            return [_shown(raw, self.node, mover) for raw in self.shards]
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(f"the shards that {self.node} has told of are none: {error}") from error

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "shards": tuple(raw["shards"]), "flaws": tuple(raw["flaws"])})


@dataclass(frozen=True, kw_only=True)
class Chosen(Document):
    """What becomes durable.

    Attributes:
        iteration: Which checkpoint.
        nodes: Nodes that hold it; the index is the mover.
        contents: Hash of all seals.
        shards: Node of each rank's shard.
        why: Why not a newer one; empty if there is none.
    """

    iteration: int
    nodes: tuple[str, ...]
    contents: str
    shards: tuple[str, ...]
    why: str = ""

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "nodes": tuple(raw["nodes"]), "shards": tuple(raw["shards"])})


@dataclass(frozen=True, kw_only=True)
class Written(Document):
    """A mover is done with its part of the file; ``nbytes`` it has written itself, the rest was there."""

    contents: str
    nbytes: int

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        return cls(**raw)


@dataclass(frozen=True, kw_only=True)
class Verified(Document):
    """A share of the file as it was read back; as :class:`slurm_resil.drain.readback.Found`, and where from."""

    contents: str
    wrong: tuple[int, ...]
    blocks: tuple[str, ...]
    frame: str
    read_from: str

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "wrong": tuple(raw["wrong"]), "blocks": tuple(raw["blocks"])})


@dataclass(frozen=True, kw_only=True)
class Failed(Document):
    """Why nothing comes of it."""

    words: str
    at_s: float = field(default_factory=now_s)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> Self:
        return cls(**raw)


class Board:
    """The directory; whoever looks sees what the others have published.

    Args:
        run_dir: Run's directory.
        job_id: Job that is gone.
        attempt: Its attempt.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, run_dir: str, job_id: int, attempt: int) -> None:
        self.path = paths.late(run_dir, job_id, attempt)
        self._insist(lambda: None)

    def put(self, name: str, document: Document) -> None:
        """Publish.

        Raises:
            OSError: Storage refused.
        """
        final = os.path.join(self.path, name)
        self._insist(lambda: fsio.write_atomic(final, document.to_bytes()))

    def propose(self, name: str, document: Document) -> None:
        """Publish unless there is one already.

        Raises:
            OSError: Storage refused.
        """
        final = os.path.join(self.path, name)
        temp = f"{final}.{os.getpid()}.{os.urandom(4).hex()}"

        def once() -> None:
            fsio.write_atomic(temp, document.to_bytes())
            with contextlib.suppress(FileExistsError):
                os.link(temp, final)

        try:
            self._insist(once)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp)

    def get(self, name: str, kind: type[D]) -> D | None:
        """Read; None if there is none, or one that is torn or of another version."""
        try:
            return kind.load(os.path.join(self.path, name))
        except (FileNotFoundError, DataError):
            return None

    def nodes(self) -> frozenset[str]:
        """Nodes that have told what they have."""
        return frozenset(match[1] for name in self._names() if (match := _HEADS.match(name)))

    def heads(self) -> dict[str, Heads]:
        """What they have told, by node, in the order of the names."""
        found = {}
        for node in sorted(self.nodes()):
            heads = self.get(heads_name(node), Heads)
            if heads is not None and heads.node == node:
                found[node] = heads
        return found

    def counted(self, kind: str) -> set[int]:
        """Numbers of the files ``written`` or ``verified``."""
        matches = [_COUNTED.match(name) for name in self._names()]
        return {int(match[2]) for match in matches if match and match[1] == kind}

    def all_written(self, mover: int, movers: int) -> bool:
        """Whether all movers have written, or the file is a new one and this one has to write again."""
        there = self.counted("written")
        return mover not in there or there >= set(range(movers))

    def begin_file(self) -> None:
        """Forget what was written and read back: the file is a new one."""
        self._remove([name for name in self._names() if _COUNTED.match(name)])

    def begin(self) -> None:
        """Forget everything but what the nodes have."""
        self._remove([name for name in self._names() if not _HEADS.match(name)])

    def settle(self, iteration: int) -> None:
        """Delete what is here now, if no node has told of anything newer than a checkpoint that is durable."""
        names = self._names()
        for name in names:
            if _HEADS.match(name):
                try:
                    shown = Heads.load(os.path.join(self.path, name)).shown(0)
                except FileNotFoundError:  # another process clears as well
                    continue
                except DataError:  # of another version perhaps, and newer
                    return
                if any(one.iteration > iteration for one in shown):
                    return
        self._clear(names)

    def clear(self) -> None:
        """Delete everything."""
        self._clear(self._names())

    def _clear(self, names: Sequence[str]) -> None:
        """Delete these, and the directory unless something has come since."""
        self._remove(names)
        for path in (self.path, os.path.dirname(self.path)):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _insist(self, act: Callable[[], None]) -> None:
        """Write, again if another process has cleared the directory meanwhile."""
        left = _TRIES
        while True:
            try:
                os.makedirs(self.path, exist_ok=True)
                return act()
            except (FileNotFoundError, FileExistsError):  # makedirs says the latter of what goes while it looks
                left -= 1
                if not left:
                    raise

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []


def heads_name(node: str) -> str:
    """File of a node's heads."""
    return f"heads-{node}.json"


def written_name(mover: int) -> str:
    """File that says that a mover is done."""
    return f"written-{mover:06d}.json"


def verified_name(share: int) -> str:
    """File of a share that was read back."""
    return f"verified-{share:06d}.json"


CHOSEN, FAILED = "chosen.json", "failed.json"


def _packed(manifest: ShardManifest) -> list[Any]:
    one = manifest
    head = [one.iteration, one.rank, one.run_id, one.job_id, one.attempt, one.world_size, one.created_s]
    return [head, one.metrics, publishing.seal(one), [row(item) for item in items_of(one)[0]]]


def _shown(raw: Sequence[Any], node: str, mover: int) -> Shown:
    (iteration, rank, run_id, job_id, attempt, world_size, created_s), metrics, seal, rows = raw
    found = Found(
        mover=mover,
        rank=rank,
        run_id=run_id,
        job_id=job_id,
        attempt=attempt,
        world_size=world_size,
        created_s=created_s,
    )
    items = tuple(item_of(one) for one in rows)
    return Shown(found=found, iteration=iteration, node=node, metrics=dict(metrics), seal=str(seal), items=items)
