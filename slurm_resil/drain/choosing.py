"""Which checkpoint of a job that is gone becomes durable: what its nodes have decides, whoever looks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import ConfigError, DataError, ResilError
from slurm_resil.core.log import now_s
from slurm_resil.drain import heads as h
from slurm_resil.drain import publishing
from slurm_resil.drain.plan import Plan
from slurm_resil.drain.planning import Alone
from slurm_resil.format import sealed
from slurm_resil.format.manifest import ShardManifest

POLL_S, _MOST_POLL_S = 0.2, 5.0


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a node knows of its job, from ``run.json`` in the job's directory.

    Attributes:
        run_id: Run.
        job_id: Job.
        attempt: Its attempt.
        run_dir: Run's directory.
        node: Name of this node.
    """

    run_id: str
    job_id: int
    attempt: int
    run_dir: str
    node: str

    @classmethod
    def read(cls, job_dir: str) -> Own:
        """Read it.

        Raises:
            ConfigError: There is none, or it says too little.
        """
        path = paths.run_info(job_dir)
        mend = "only what an agent of this version has sealed can be drained late"
        try:
            raw = fsio.read_json(path, limit_bytes=1 << 16)
            own = cls(
                run_id=str(raw["run_id"]),
                job_id=int(raw["job_id"]),
                attempt=int(raw["attempt"]),
                run_dir=str(raw["run_dir"]),
                node=str(raw["node"]),
            )
        except FileNotFoundError as error:
            raise ConfigError(f"there is no {path}", mend=mend, path=path) from error
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} does not say which run this is: {error}", mend=mend, path=path) from error
        if not own.run_dir.startswith("/") or not h.NODE.fullmatch(own.node):
            words = f"{path} says run_dir={own.run_dir!r}, node={own.node!r}"
            raise ConfigError(words, mend="an absolute path and a name of a node are needed", path=path)
        return own


@dataclass(frozen=True, kw_only=True)
class Work:
    """A checkpoint that was chosen, as this node sees it.

    Attributes:
        chosen: What was chosen.
        plans: Plans of all movers.
        mover: This node's number among them; -1: it holds nothing of it.
        plan: Its plan.
        own: Its shards.
    """

    chosen: h.Chosen
    plans: Alone
    mover: int
    plan: Plan
    own: tuple[ShardManifest, ...]

    @property
    def iteration(self) -> int:
        """Which checkpoint."""
        return self.chosen.iteration

    @property
    def movers(self) -> int:
        """Number of nodes that hold it."""
        return len(self.chosen.nodes)


def expected_nodes(own: Own) -> frozenset[str]:
    """Nodes of the attempt, as its launcher has recorded them; none if nobody knows."""
    path = paths.attempt(own.run_dir, own.attempt)
    with contextlib.suppress(OSError, DataError, KeyError, TypeError):
        raw = fsio.read_json(path, limit_bytes=1 << 24)
        if raw["job_id"] == own.job_id:
            return frozenset(str(node) for node in raw["nodes"])
    return frozenset()


def understand(own: Own, board: h.Board, chosen: h.Chosen, manifests: Sequence[ShardManifest]) -> Work | None:
    """Plan what was chosen; None if the nodes say something else by now."""
    places = {node: place for place, node in enumerate(chosen.nodes)}
    shown = {
        one.found.rank: one
        for node, heads in board.heads().items()
        for one in (heads.shown(places[node]) if node in places else ())
        if one.iteration == chosen.iteration
        and one.found.rank < len(chosen.shards)
        and chosen.shards[one.found.rank] == node
    }
    if len(shown) != len(chosen.shards) or _contents(list(shown.values())) != chosen.contents:
        return None
    plans = Alone(
        [one.head(places[one.node]) for one in shown.values()],
        {rank: one.items for rank, one in shown.items()},
        len(chosen.nodes),
    )
    mover = places.get(own.node, -1)
    mine = [
        one
        for one in manifests
        # an attempt before may have had more ranks
        if one.iteration == chosen.iteration and one.rank < len(chosen.shards) and chosen.shards[one.rank] == own.node
    ]
    return Work(chosen=chosen, plans=plans, mover=mover, plan=plans.of(max(mover, 0)), own=tuple(mine))


def _contents(shown: Sequence[h.Shown]) -> str:
    return publishing.contents((one.found.rank, one.seal) for one in shown)


def best(heads: Mapping[str, h.Heads], after: int) -> tuple[h.Chosen | None, str]:
    """The newest checkpoint that is complete on the nodes; and why not the newest of all. Pure."""
    shown = [one for place, own in enumerate(heads.values()) for one in own.shown(place)]
    why = ""
    nodes = list(heads)
    for iteration in sorted({one.iteration for one in shown if one.iteration > after}, reverse=True):
        found = [one.found for one in shown if one.iteration == iteration]
        try:
            chosen = sealed.choose(found, [], iteration)
        except ResilError as error:
            why = why or error.message
            continue
        where = [nodes[chosen[rank].mover] for rank in sorted(chosen)]
        mine = [one for one in shown if one.iteration == iteration and chosen.get(one.found.rank) == one.found]
        holders = tuple(sorted(set(where)))
        return h.Chosen(iteration=iteration, nodes=holders, contents=_contents(mine), shards=tuple(where), why=why), why
    return None, why or "no checkpoint is sealed"


class Polls:
    """Longer and longer pauses."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep, self._next_s = sleep, POLL_S

    def wait(self) -> None:
        """Pause."""
        self._sleep(self._next_s)
        self._next_s = min(self._next_s * 1.5, _MOST_POLL_S)


def drop(own: Own, iteration: int, words: str, *, kept: bool) -> None:
    """Write down why a checkpoint is not durable; best effort.

    Args:
        own: Who says so.
        iteration: Of which.
        words: Why.
        kept: Whether its shards are in the burst buffers still.
    """
    body = {"iteration": iteration, "job_id": own.job_id, "attempt": own.attempt, "node": own.node}
    with contextlib.suppress(OSError):
        fsio.write_json(paths.dropped(own.run_dir, iteration), {**body, "why": words, "kept": kept, "at_s": now_s()})
