"""The leader's side of a restore: surveys in, plans out, until every rank has loaded the same iteration."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

from slurm_resil.agent.events import SetAside
from slurm_resil.agent.protocol import OTHER_WORLD, UNREADABLE, Loaded, Plan
from slurm_resil.agent.survey import DRAINED, SHARDS, choose, drained_iterations
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

    Attributes:
        number: Number of the newest plan.
        plan: Plan that is being loaded or was loaded; None before all surveys are there.
        going: Whether all ranks have loaded it.
        failed: What a rank said that cannot load anything, None if none has.
    """

    def __init__(self, run_dir: str, nodes: int, ranks_per_node: int) -> None:
        self._run_dir, self._nodes, self._per_node = run_dir, nodes, ranks_per_node
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
        self._surveyed: set[int] = set()
        self._loaded: set[int] = set()

    def resume(self, number: int) -> None:
        """The ranks of this cycle train already."""
        self.number, self.going = number, True

    def survey(
        self,
        place: int,
        shards: Sequence[tuple[int, int, int]],
        passed_over: Sequence[tuple[int, int, str]] = (),
        whole: Sequence[int] = (),
    ) -> None:
        """Hear which shards a node has, see Survey; those of ranks that are placed elsewhere do not count."""
        if self.going:
            return
        self._passed_over += passed_over
        self._others += [words for _, _, words in passed_over if OTHER_WORLD in words]
        if self._nodes == 1:
            self._whole = set(whole)
        own = range(place * self._per_node, (place + 1) * self._per_node)
        for rank in own:
            self._shards[rank] = {iteration: attempt for iteration, owner, attempt in shards if owner == rank}
        self._surveyed.add(place)

    def make(self, cycle: int) -> Plan | None:
        """Make a plan if one is due: the first when all surveys are there, another after each refusal."""
        if self.going or len(self._surveyed) < self._nodes or (self.plan is not None and not self._again):
            return None
        self._again = False
        durable: set[int] = set()
        try:
            durable = drained_iterations(self._run_dir)
        except OSError as error:
            self._error = self._error or f"cannot read {self._run_dir}: {error.strerror}"
        world_size = self._nodes * self._per_node
        choice = choose(self._shards, durable, self._bad, world_size, drained_by=self._drained_by, whole=self._whole)
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
            lost=[
                (iteration, rank, why)
                for (iteration, rank), why in self._bad.items()
                if rank != SHARDS or not why.startswith(UNREADABLE)
            ],
            error=self._error,
            final=self._final or (self.failed is not None and self.failed.outcome == "unfit"),
        )
        return self.plan

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
