"""A run in one process, step by step: the real leader, agents, ballots, seats and slots, without threads or files.

What is replaced: the clock stands still unless it is told; connections are queues; the burst buffer is a dictionary;
the pool that hashes does so when it is told; control pages are lists, and the stores of a rank wait in a buffer until
they are flushed, as a processor's do. A rank does what session and link do, in few steps.

A world can be copied, so that ``explore`` comes to every state in every order.
"""

from __future__ import annotations

import enum
import functools
import pickle
import queue
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from slurm_resil.agent import agent as agents
from slurm_resil.agent import desk as desks
from slurm_resil.agent import hub as hubs
from slurm_resil.agent import leader as leaders
from slurm_resil.agent import seat as seats
from slurm_resil.agent import slots as slots_
from slurm_resil.agent.decisions import Decisions
from slurm_resil.agent.setup import AgentConfig
from slurm_resil.comm.channel import ChannelClosedError
from slurm_resil.core import control as c
from slurm_resil.core.errors import ResilError
from slurm_resil.core.model import Notice, NoticeKind, RunInfo
from slurm_resil.format import draft as drafts
from slurm_resil.format.manifest import ShardManifest

FAR = 1e18


class Clock:
    """Stands in for the module ``time``."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, _: float) -> None:
        return


CLOCK = Clock()


class End:
    """One end of a connection; what was sent to it waits in ``inbox``."""

    peer, peer_uid = "model", 0

    def __init__(self) -> None:
        self.inbox: list[dict[str, Any]] = []
        self.other: End
        self.closed = False

    def send(self, message: dict[str, Any], timeout_s: float = 0.0) -> None:
        if self.closed:
            raise ChannelClosedError("closed")
        self.other.inbox.append(message)

    def close(self) -> None:
        self.closed = self.other.closed = True


def pair() -> tuple[End, End]:
    here, there = End(), End()
    here.other, there.other = there, here
    return here, there


class Page:
    """A control page."""

    def __init__(self, path: str, ranks: int) -> None:
        self.path, self.ranks, self.occupied = path, ranks, True
        self.words = [0] * (c.HEAD_WORDS + ranks * c.BLOCK_WORDS)
        self.words[c.RANKS], self.words[c.MAGIC] = ranks, c.MAGIC_VALUE

    def block(self, local_rank: int) -> int:
        return c.HEAD_WORDS + local_rank * c.BLOCK_WORDS

    def close(self) -> None:
        return


class Stores:
    """The page as its rank sees it: its own stores at once, others see them when they are flushed."""

    def __init__(self, words: list[int]) -> None:
        self.words = words
        self.waiting: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> int:
        return next((value for at, value in reversed(self.waiting) if at == index), self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.waiting.append((index, value))

    def flush(self) -> None:
        for index, value in self.waiting:
            self.words[index] = value
        self.waiting.clear()


@dataclass(frozen=True)
class Shard:
    """Bytes of a slot: which life of the training they are of, and whether they are all there."""

    past: int
    iteration: int
    generation: int
    whole: bool


@dataclass
class Disk:
    """Burst buffer of a node: it survives everything here."""

    slots: dict[tuple[int, int], Shard] = field(default_factory=dict)
    manifests: dict[tuple[int, int], ShardManifest] = field(default_factory=dict)  # by iteration and rank
    encoded: dict[int, tuple[int, ...]] = field(default_factory=dict)  # generations of the shards that it is made of
    pinned: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # pinned by an encode
    broken: bool = False

    def holds(self, manifest: ShardManifest) -> bool:
        """Whether the slot has what a manifest says."""
        place = slots_.parse(manifest.slot)
        assert place is not None
        shard = self.slots.get(place)
        return shard is not None and shard.whole and shard.generation == manifest.generation


@dataclass(frozen=True)
class Kept:
    """In place of the path of a manifest."""

    manifest: ShardManifest


class Loader:
    """In place of ``ShardManifest`` where an agent reads one."""

    @staticmethod
    def load(path: Kept) -> ShardManifest:
        return path.manifest


class Slots(slots_.Slots):
    """The real rules; only the removal of a manifest is another."""

    disk: Disk

    def discard_above(self, iteration: int) -> list[int]:
        found = [one.iteration for one in self._slots if one.iteration > iteration and not one.busy]
        for newer in found:
            self.disk.manifests.pop((newer, self._rank), None)
            self.free(newer)
        return found

    def _evict(self, iteration: int) -> bool:
        if iteration in self.disk.pinned | self.disk.held:
            return False
        self._forget(iteration)
        self.disk.manifests.pop((iteration, self._rank), None)
        return True


class Store:
    """See slurm_resil.agent.store."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def sealed(self) -> dict[int, dict[int, Kept]]:
        found: dict[int, dict[int, Kept]] = {}
        for (iteration, rank), manifest in self.disk.manifests.items():
            found.setdefault(iteration, {})[rank] = Kept(manifest)
        return found

    def seal(self, draft: ShardManifest) -> ShardManifest:
        if self.disk.broken:
            raise OSError("for the model")
        if not self.disk.holds(draft):
            raise ResilError(f"{draft.slot} is not what the draft says")
        self.disk.manifests[draft.iteration, draft.rank] = draft
        return draft

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        return "lost" if self.disk.manifests.pop((iteration, rank), None) else None

    def encoded(self) -> set[int]:
        return set(self.disk.encoded)

    def forget(self, iteration: int) -> None:
        self.disk.encoded.pop(iteration, None)


class Whole:
    """In place of ``Descriptions``: a draft here is complete."""

    def complete(self, draft: drafts.Draft) -> ShardManifest:
        values = dict(vars(draft))
        del values["description"]
        return ShardManifest(**values)


class Job:
    """What the pool has to do, and its future in one."""

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.call, self.arguments = call, arguments
        self.value: Any = None
        self.error: Exception | None = None
        self.then: Callable[[Job], None]

    def add_done_callback(self, call: Callable[[Job], None]) -> None:
        self.then = call

    def run(self) -> None:
        try:
            self.value = self.call(*self.arguments)
        except (ResilError, OSError, ValueError) as error:
            self.error = error
        self.then(self)

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Pool:
    """In place of the threads that hash."""

    def __init__(self, *_: object, **__: object) -> None:
        self.jobs: list[Job] = []

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Job:
        self.jobs.append(Job(call, arguments))
        return self.jobs[-1]


class Inbox:
    """In place of a queue, for one thread; pickles."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def put(self, call: Any) -> None:
        self.calls.append(call)

    def get(self, timeout: float = 0.0) -> Callable[[], None]:
        if not self.calls:
            raise queue.Empty
        return self.calls.pop(0)


class Hub(hubs.Hub):
    """The real one without its thread."""

    def __init__(self, names: Any, *, hear: Any, gone: Any, turn: Any) -> None:
        self.nodes = [hubs.Node(name=name) for name in names]
        self.address = ""
        self._hear, self._gone, self._turn, self._checked = hear, gone, turn, CLOCK.now

    def start(self) -> None:
        return

    def put(self, call: Callable[[], None]) -> None:
        call()
        self._turn(CLOCK.now)

    def attach(self) -> Any:
        here, there = pair()
        return here, there


class Told:
    """In place of the leader's queue of events: keeps the newest iteration that it has announced, and restored."""

    def __init__(self) -> None:
        self.announced = self.protected = self.durable = 0
        self.restored: list[tuple[int, int]] = []

    def put(self, happened: Any) -> None:
        if isinstance(happened, leaders.e.SealedAll):
            self.announced = max(self.announced, happened.iteration)
        elif isinstance(happened, leaders.e.Restored):
            self.restored.append((happened.iteration, happened.protected))


class NoCosts:
    """In place of ``Costs``."""

    @classmethod
    def load(cls, _: str) -> NoCosts:
        return cls()

    def add(self, *_: object) -> None:
        return

    save = add


@contextmanager
def replaced() -> Iterator[None]:
    """Put the parts above in place of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (agents, desks, leaders, seats, hubs):
            patch.setattr(module, "time", CLOCK)
        patch.setattr(leaders, "Hub", Hub)
        patch.setattr(leaders, "Costs", NoCosts)
        patch.setattr(leaders, "Decisions", lambda _: Decisions(None))
        patch.setattr(leaders, "RETRY_S", 0.0)
        patch.setattr(leaders, "event", lambda *_, **__: None)
        patch.setattr(agents, "event", lambda *_, **__: None)
        patch.setattr(desks, "event", lambda *_, **__: None)
        patch.setattr(agents, "GraceSignals", Quiet)
        patch.setattr(desks, "ThreadPoolExecutor", Pool)
        patch.setattr(desks, "Slots", Slots)
        patch.setattr(desks, "ShardManifest", Loader)
        patch.setattr(c, "register_barriers", lambda: True)
        yield


class Quiet:
    """In place of ``GraceSignals``."""

    def poll(self, _: float) -> None:
        return None


def frozen(world: Any) -> bytes:
    """A world as bytes."""
    return pickle.dumps(world, pickle.HIGHEST_PROTOCOL)


def thawed(data: bytes) -> Any:
    """A world of its own, from bytes."""
    return pickle.loads(data)


# what does not change, what nothing depends on, and what is found elsewhere as well
_LEFT_OUT = {
    *("_config", "_info", "_run_dir", "_watch", "costs", "bounds", "signals", "path", "_job_dir", "_quiet_since"),
    *(
        "_tell",
        "_later",
        "_forget",
        "_hear",
        "_gone",
        "_turn",
        "_send",
        "_barrier",
        "_fenced",
        "_nodes",
        "_words",
        "page",
    ),
}


_SIMPLE = (int, str, float, bool, type(None))


def key(world: Any) -> int:
    """The same number for worlds in which the same can happen."""
    seen: dict[int, int] = {}

    def plain(value: Any) -> Any:
        kind = type(value)
        if kind in _SIMPLE:
            return value
        if kind in (list, tuple, deque):
            return tuple([one if type(one) in _SIMPLE else plain(one) for one in value])
        if kind is dict:
            return tuple([(name, plain(value[name])) for name in sorted(value)])
        if kind is ShardManifest:
            return (value.slot, value.generation)
        if kind in (set, range, frozenset):
            return tuple(sorted(value))
        if kind is functools.partial:
            return (plain(value.func), plain(value.args))
        if kind in (types.MethodType, types.BuiltinMethodType):
            return (value.__name__, plain(value.__self__))
        if kind in (types.FunctionType, types.BuiltinFunctionType):
            return value.__name__
        if isinstance(value, enum.Enum):
            return value.name
        if id(value) in seen:
            return (kind.__name__, seen[id(value)])
        seen[id(value)] = len(seen)
        named = [plain(one) for name, one in vars(value).items() if name not in _LEFT_OUT]
        return (kind.__name__, *named)

    return hash(plain(world))


def notice() -> Notice:
    return Notice(kind=NoticeKind.PERSON, stop=False)


def run_info(nodes: int, ranks: int, cycle: int) -> RunInfo:
    return RunInfo(run_id="run", job_id=7, attempt=0, cycle=cycle, world_size=nodes * ranks, nodes=nodes)


def config(node: int, nodes: int, ranks: int, slots: int) -> AgentConfig:
    return AgentConfig(
        info=run_info(nodes, ranks, 0),
        node=f"node{node}",
        node_rank=node,
        nodes=tuple(f"node{one}" for one in range(nodes)),
        ranks_per_node=ranks,
        job_dir=f"/nowhere/{node}",
        run_dir=".",
        leader="model",
        slots=slots,
    )
