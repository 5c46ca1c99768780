"""Real ranks race against proposals: every rank saves at exactly the proposed iteration, every time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resil.agent.agreement import Agreement, Progress
from slurm_resil.agent.ballot import Ballot
from slurm_resil.agent.hub import Node
from slurm_resil.agent.protocol import Decide, Propose, Vote
from slurm_resil.agent.seat import Kind, Seat
from slurm_resil.core import control as c

RACER = str(Path(__file__).with_name("racer.py"))
NODES, PER_NODE = 2, 2
MANY = 8


class Blind(Ballot):
    """A ballot without the check: it says yes to everything."""

    def consider(self, propose: Propose) -> Vote:
        vote = super().consider(propose)
        if not vote.yes:
            self._words[c.PROPOSAL], self._words[c.DECISION] = propose.iteration, c.OPEN
        return Vote(epoch=vote.epoch, yes=True, newest=vote.newest)


class Race:
    """The pages of some nodes in one process, the ranks in processes of their own.

    Args:
        work: Directory.
        nodes: Number of nodes.
        per_node: Ranks of each.
        pace_s: An iteration takes as long as this; 0: it is as fast as can be, and nodes do not wait for each other.
    """

    def __init__(self, work: Path, nodes: int = NODES, per_node: int = PER_NODE, pace_s: float = 0.0) -> None:
        self.work, self.nodes, self.per_node = work, nodes, per_node
        names = [str(work / f"page{place}") for place in range(nodes)]
        self.pages = [c.ControlPage.create(name, per_node) for name in names]
        self.ballots = [Ballot(page) for page in self.pages]
        self.committed: dict[int, int] = {}
        self.refused = 0
        self.ranks = [
            subprocess.Popen(
                [sys.executable, RACER, name, str(local), str(self.log(place, local)), str(pace_s)]
                + [other for other in names if other != name and pace_s]
            )
            for place, name in enumerate(names)
            for local in range(per_node)
        ]

    def log(self, place: int, local: int) -> Path:
        return self.work / f"log{place}{local}"

    def run(self, commits: int, *, refusals: int = 0, margin: int | None = None, enough_s: float = 60.0) -> None:
        """Propose until there are so many of both, or it has taken long enough (the host may be busy).

        Without a margin it is computed as the leader does.
        """
        enough = time.monotonic() + enough_s
        deadline = enough + 60
        agreement = Agreement()
        before = self.progress(None, 0.0)
        while any(node.newest < 10 for node in before.values()):
            assert time.monotonic() < deadline, "the ranks do not start"
            time.sleep(0.01)
            before = self.progress(None, 0.0)
        while (len(self.committed) < commits or self.refused < refusals) and time.monotonic() < enough:
            now = time.monotonic()
            before = self.progress(before, now)
            proposal = agreement.propose(before, now, stop=False)
            if margin is not None:
                iteration = max(node.newest for node in before.values()) + margin
                proposal = Propose(epoch=proposal.epoch, iteration=iteration, stop=False)
            verdict = None
            for place, ballot in enumerate(self.ballots):
                vote = ballot.consider(proposal)
                verdict = verdict or agreement.vote(
                    place, vote.epoch, yes=vote.yes, newest=vote.newest, now=time.monotonic()
                )
            assert verdict is not None
            decide = Decide(epoch=proposal.epoch, commit=verdict.commit, iteration=proposal.iteration, stop=False)
            for ballot in self.ballots:
                ballot.decide(decide)
            if not verdict.commit:
                self.refused += 1
                continue
            self.committed[proposal.epoch] = proposal.iteration
            while any(page.words[c.PROPOSAL] for page in self.pages):
                for ballot in self.ballots:
                    ballot.tidy()
                time.sleep(0.0002)
                assert time.monotonic() < deadline, f"{len(self.committed)} commits and {self.refused} refusals"

    def progress(self, before: dict[int, Progress] | None, now: float) -> dict[int, Progress]:
        found = {}
        for place, ballot in enumerate(self.ballots):
            node = Node(name=str(place), progress=before[place] if before is not None else Progress())
            node.report(ballot.newest, None, now)
            found[place] = node.progress
        return found

    def end(self) -> list[dict[int, int]]:
        """End the ranks; returns where each has saved, by epoch."""
        for page in self.pages:
            page.words[c.HEAD_WORDS + self.per_node * c.BLOCK_WORDS] = 1
        assert [rank.wait(20) for rank in self.ranks] == [0] * len(self.ranks)
        found = []
        for place in range(self.nodes):
            for local in range(self.per_node):
                lines = [line.split() for line in self.log(place, local).read_text().splitlines()]
                assert all(line[2] == "1" for line in lines), "a rank had no decision in time"
                found.append({int(epoch): int(iteration) for epoch, iteration, _ in lines})
        return found

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        for page in self.pages:
            page.close()


@pytest.fixture
def race(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Race]:
    made = Race(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


EIGHT = {"nodes": MANY, "per_node": 1, "pace_s": 0.001}


def test_all_ranks_save_at_the_same_iteration_every_time(race: Race) -> None:
    race.run(5000, enough_s=20)
    assert len(race.committed) > 200
    assert race.end() == [race.committed] * 4


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_twenty_thousand_times(race: Race) -> None:
    race.run(20_000, enough_s=1500)
    assert len(race.committed) == 20_000
    assert race.end() == [race.committed] * 4


def test_proposals_in_the_thick_of_it(race: Race) -> None:
    """One above the newest: many are refused, and those that are not still hold."""
    race.run(300, refusals=50, margin=1)
    assert race.refused >= 50
    assert race.end() == [race.committed] * 4


@pytest.mark.parametrize("race", [EIGHT], indirect=True)
def test_notices_on_eight_nodes(race: Race) -> None:
    race.run(2000, enough_s=15)
    assert len(race.committed) > 50
    assert race.end() == [race.committed] * MANY


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("race", [EIGHT], indirect=True)
def test_ten_thousand_notices_on_eight_nodes(race: Race) -> None:
    race.run(10_000, enough_s=3000)
    assert len(race.committed) == 10_000
    assert race.end() == [race.committed] * MANY


@pytest.mark.parametrize(("kind", "where"), [(Ballot, {}), (Blind, {0: 6, 1: 5})])
def test_without_the_check_they_are_apart(tmp_path: Path, kind: type[Ballot], where: dict[int, int]) -> None:
    """One rank has passed the iteration when it is proposed, the other has not: in this order, every time."""
    page = c.ControlPage.create(str(tmp_path / "page"), 2)
    seats = [Seat(page, local) for local in range(2)]
    ballot = kind(page)
    for seat, iteration in zip(seats, (5, 4), strict=True):
        page.words[seat.iteration] = iteration
        assert seat.look(iteration).kind is Kind.NOTHING
    vote = ballot.consider(Propose(epoch=1, iteration=5, stop=False))
    ballot.decide(Decide(epoch=1, commit=vote.yes, iteration=5, stop=False))
    saved = {}
    for local, iteration in ((0, 6), (1, 5), (1, 6)):
        page.words[seats[local].iteration] = iteration
        if seats[local].look(iteration).kind is Kind.SAVE:
            saved[local] = iteration
    assert saved == where
    page.close()
