"""The leader's side of a restore: surveys in, plans out, until every rank has loaded the same iteration.

Where the leader's host can rebuild shards from the redundancy of the other nodes, that comes before a plan that would
go back behind an iteration with redundancy: the host is asked, and when it has tried, the nodes look again.
"""

from __future__ import annotations

import contextlib
import logging
import os

from slurm_resil.agent.events import SetAside
from slurm_resil.agent.protocol import OTHER_WORLD, UNREADABLE, Loaded, Plan, Survey
from slurm_resil.agent.survey import DRAINED, SHARDS, Choice, choose, drained_iterations
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.log import event

log = logging.getLogger(__name__)


class Restoring:
    """Decides for one cycle after the other.

    Args:
        run_dir: Run's directory.
        nodes: Number of nodes.
        ranks_per_node: Ranks of each.
        rebuilds: Whether the leader's host can rebuild shards.

    Attributes:
        number: Number of the newest plan.
        plan: Plan that is being loaded or was loaded; None before all surveys are there.
        going: Whether all ranks have loaded it.
        failed: What a rank said that cannot load anything, None if none has.
        rebuilding: Iteration that the host is rebuilding, None if it is not.
    """

    def __init__(self, run_dir: str, nodes: int, ranks_per_node: int, *, rebuilds: bool = False) -> None:
        self._run_dir, self._nodes, self._per_node, self._rebuilds = run_dir, nodes, ranks_per_node, rebuilds
        self.number = 0
        self._passed_over: list[tuple[int, int, str]] = []
        self._bad: dict[tuple[int, int], str] = {}  # kept over cycles: no artefact is tried twice
        self.start()

    def start(self) -> None:
        """Begin a cycle."""
        self.plan: Plan | None = None
        self.going = False
        self.failed: Loaded | None = None
        self._error, self._final = "", False
        self._again = False
        self._shards: dict[int, dict[int, int]] = {}
        self._others: list[str] = []
        self._whole: set[int] = set()
        self._encoded: dict[int, set[int]] = {}
        self._surveyed: set[int] = set()
        self._loaded: set[int] = set()
        self._tried: set[int] = set()
        self.rebuilding: int | None = None

    def resume(self, number: int) -> None:
        """The ranks of this cycle train already."""
        self.number, self.going = number, True

    def survey(self, place: int, said: Survey) -> None:
        """Hear which shards a node has; those of ranks that are placed elsewhere do not count."""
        if self.going or self.rebuilding is not None:
            return
        self._passed_over += [one for one in said.passed_over if one not in self._passed_over]  # nodes may look again
        self._others += [words for _, _, words in said.passed_over if OTHER_WORLD in words]
        if self._nodes == 1:
            self._whole = set(said.whole)
        own = range(place * self._per_node, (place + 1) * self._per_node)
        for rank in own:
            self._shards[rank] = {iteration: attempt for iteration, owner, attempt in said.shards if owner == rank}
        self._encoded[place] = set(said.encoded)
        self._surveyed.add(place)

    def rebuild(self) -> tuple[int, list[int]] | None:
        """Say what the host must rebuild before a plan is made: the iteration, and the places that lack shards of it.

        None if there is nothing, or it was tried. Newer iterations come first.
        """
        if not self._rebuilds or not self._ready:
            return None
        with contextlib.suppress(OSError):
            choice = self._choose(drained_iterations(self._run_dir))
            encoded = set().union(*self._encoded.values()) - self._tried
            for iteration in sorted((one for one in encoded if one > choice.iteration), reverse=True):
                lack = self._lack(iteration)
                if len(lack) < self._nodes:
                    self._tried.add(iteration)
                    self.rebuilding = iteration
                    return iteration, sorted(lack)
        return None

    def rebuilt(self, iteration: int, *, ok: bool) -> bool:
        """Hear how the host has fared; True if the nodes must look again."""
        if iteration != self.rebuilding:
            return False
        self.rebuilding = None
        if ok:
            # what was bad has been replaced
            self._bad = {(at, rank): why for (at, rank), why in self._bad.items() if at != iteration or rank < 0}
            self.look_again()
        return ok

    def look_again(self) -> None:
        """Forget the surveys: there will be others."""
        self._surveyed.clear()
        self._others.clear()

    def may_rebuild(self, iteration: int) -> bool:
        """Whether a shard of an iteration that turned out bad can be had again."""
        return (
            self._rebuilds and iteration not in self._tried and any(iteration in one for one in self._encoded.values())
        )

    @property
    def lost(self) -> list[tuple[int, int, str]]:
        """Artefacts that were found bad, see Plan."""
        return [
            (iteration, rank, why)
            for (iteration, rank), why in self._bad.items()
            if rank != SHARDS or not why.startswith(UNREADABLE)
        ]

    @property
    def _ready(self) -> bool:
        """Whether a plan is due: the first when all surveys are there, another after each refusal."""
        due = self.plan is None or self._again
        return due and not self.going and self.rebuilding is None and len(self._surveyed) == self._nodes

    def _lack(self, iteration: int) -> set[int]:
        """Places that lack a shard of an iteration, as the newest attempt that has come to it has written it."""
        newest = max((here[iteration] for here in self._shards.values() if iteration in here), default=None)
        return {
            rank // self._per_node
            for rank, here in self._shards.items()
            if newest is None or here.get(iteration) != newest or (iteration, rank) in self._bad
        }

    def _choose(self, durable: set[int]) -> Choice:
        return choose(
            self._shards,
            durable,
            self._bad,
            self._nodes * self._per_node,
            drained_by=self._drained_by,
            whole=self._whole,
        )

    def make(self, cycle: int) -> Plan | None:
        """Make a plan if one is due."""
        if not self._ready:
            return None
        self._again = False
        durable: set[int] = set()
        try:
            durable = drained_iterations(self._run_dir)
        except OSError as error:
            self._error = self._error or f"cannot read {self._run_dir}: {error.strerror}"
        choice = self._choose(durable)
        if self._others and not choice.iteration and not self._error:
            # to begin afresh would give up what is there, and it is most likely a mistake
            why = self._others[0].partition(": ")[2]
            self._error, self._final = f"{why}: start as many, or another run (--run-id)", True
        self.number += 1
        self._loaded = set()
        self.plan = Plan(
            number=self.number,
            cycle=cycle,
            iteration=choice.iteration,
            sources=list(choice.sources),
            complete=choice.complete,
            protected=self._protected(choice),
            durable=max(
                (one for one in durable if one <= choice.iteration and (one, DRAINED) not in self._bad), default=0
            ),
            lost=self.lost,
            error=self._error,
            final=self._final or (self.failed is not None and self.failed.outcome == "unfit"),
        )
        return self.plan

    def _protected(self, choice: Choice) -> int:
        """Newest iteration of which every rank has its shard and every node its part of the redundancy."""
        everywhere = set.intersection(*self._encoded.values()) & choice.everywhere if self._encoded else set()
        return max((one for one in everywhere if one <= choice.iteration), default=0)

    def _drained_by(self, iteration: int) -> int | None:
        try:
            # unchecked: the ranks that load from it check it, and all of them begin again if it is not sound
            attempt = fsio.read_json(paths.drained_manifest(self._run_dir, iteration))["attempt"]
        except (OSError, DataError, KeyError, TypeError):
            return None  # whoever reads it says why
        return attempt if isinstance(attempt, int) else None

    def set_aside(self, plan: Plan) -> list[SetAside]:
        """What nodes have passed over since the plan before, and what is restored instead."""
        passed_over, self._passed_over = self._passed_over, []
        found = []
        for iteration, rank, words in passed_over:
            source = plan.sources[rank]
            place = {"drained": self._run_dir, "fresh": ""}.get(source, "the burst buffer")
            instead = f"iteration {plan.iteration} from {place}" if place else "nothing: the run starts afresh"
            found.append(SetAside(iteration=iteration, rank=rank, words=words, instead=instead))
        return found

    def loaded(self, rank: int) -> bool:
        """Hear that a rank has loaded the plan; True when it was the last one."""
        self._loaded.add(rank)
        self.going = len(self._loaded) == self._nodes * self._per_node
        return self.going

    def refuse(self, loaded: Loaded) -> None:
        """Hear that a rank cannot load its part: another plan is due."""
        assert self.plan is not None
        self._again = True
        if loaded.outcome in ("error", "unfit"):
            # the rank says why itself; repeated by every other rank nobody would find it
            self.failed, self._error = loaded, f"rank {loaded.rank} cannot load its part, and says why"
            return
        iteration = self.plan.iteration
        if self.plan.sources[loaded.rank] == "local":
            self._bad[iteration, loaded.rank] = loaded.reason
            return
        if self.plan.sources[loaded.rank] == "shards":
            self._bad[iteration, SHARDS] = loaded.reason
            return
        self._bad[iteration, DRAINED] = loaded.reason
        if loaded.reason.startswith(UNREADABLE):
            return  # left as it is: who may read it, or can again, finds it
        source, target = paths.drained_manifest(self._run_dir, iteration), paths.drained_bad(self._run_dir, iteration)
        with contextlib.suppress(FileNotFoundError):
            try:
                os.replace(source, target)
            except PermissionError as error:
                event(log, "bad_not_marked", level=logging.ERROR, path=source, why=str(error))
