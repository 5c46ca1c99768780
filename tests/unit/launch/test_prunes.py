"""When old checkpoints are deleted, as a part of the policy: events in, actions out."""

from __future__ import annotations

from slurm_resil.core.model import NoticeKind
from slurm_resil.launch import moves as m
from slurm_resil.launch.policy import Policy, Rules
from slurm_resil.launch.verdict import Verdict

OK = Verdict(code=0, words="all ranks ended well")
BAD = Verdict(code=7, rank=0, node="n1", words="exited with code 7")


class Bench:
    """A policy on one node, with a clock."""

    def __init__(self, *, prunes: bool = True) -> None:
        self.policy = Policy(("n1",), Rules(prunes=prunes, prune_wait_s=30.0))
        self.now = 100.0
        self.policy.start()

    def on(self, event: m.Event, after: float = 0.1) -> list[m.Action]:
        self.now += after
        return self.policy.on(event, self.now)

    def prunes(self, event: m.Event, after: float = 0.1) -> list[int]:
        return [action.newest for action in self.on(event, after) if isinstance(action, m.Prune)]

    def drained(self, iteration: int, *, ok: bool = True) -> list[int]:
        self.on(m.SealedAll(iteration=iteration))
        return self.prunes(m.MoverEnded(iteration=iteration, ok=ok, duration_s=0.1))

    def restored(self, iteration: int = 0, cycle: int = 0) -> list[int]:
        return self.prunes(m.Restored(iteration=iteration, cycle=cycle, durable=iteration))


def ended(actions: list[m.Action]) -> bool:
    return any(isinstance(action, m.Finish) for action in actions)


def test_nothing_is_deleted_before_the_successor_is_durable():
    b = Bench()
    assert b.restored() == []
    assert b.prunes(m.SealedAll(iteration=10)) == []
    assert b.prunes(m.Tick(), 5.0) == []
    assert b.drained(10, ok=False) == []
    assert b.drained(10) == [10]


def test_without_rules_there_is_no_deletion():
    b = Bench(prunes=False)
    assert b.restored(40) == b.drained(50) == []
    assert ended(b.on(m.RanksEnded(verdict=OK)))


def test_one_at_a_time_and_none_is_forgotten():
    b = Bench()
    b.restored()
    assert b.drained(10) == [10]
    assert b.drained(20) == []
    assert b.prunes(m.Pruned(deleted=(5,), nbytes=7)) == [20]
    assert b.prunes(m.Pruned()) == []


def test_what_the_attempt_before_left_behind_goes_after_the_restore():
    assert Bench().restored(40) == [40]


def test_never_while_ranks_load():
    b = Bench()
    assert b.drained(10) == []  # of the attempt before; the ranks of this one still load
    assert b.restored(10) == [10]
    b.on(m.Pruned())
    b.on(m.SealedAll(iteration=20))
    b.on(m.RanksEnded(verdict=BAD, at=25))
    assert any(isinstance(action, m.StartCycle) for action in b.on(m.Probed(alive={"n1": True})))
    assert b.prunes(m.MoverEnded(iteration=20, ok=True, duration_s=0.1)) == []
    assert b.prunes(m.Tick(), 50.0) == []
    assert b.restored(20, cycle=1) == [20]


def test_ranks_that_end_without_having_loaded_keep_nobody():
    b = Bench()
    assert b.drained(10) == []
    assert b.prunes(m.RanksEnded(verdict=OK)) == [10]


def test_the_end_waits_for_the_deletion_and_not_for_ever():
    b = Bench()
    b.restored()
    b.on(m.SealedAll(iteration=10))
    b.on(m.RanksEnded(verdict=OK))
    assert b.prunes(m.MoverEnded(iteration=10, ok=True, duration_s=0.1)) == [10]
    assert not ended(b.on(m.Tick(), 29.0))
    assert ended(b.on(m.Pruned(deleted=(5,))))
    b = Bench()
    b.restored()
    assert b.drained(10) == [10]
    assert not ended(b.on(m.RanksEnded(verdict=OK)))
    assert ended(b.on(m.Tick(), 30.0))


def test_a_deletion_that_hangs_does_not_hold_up_the_deadline():
    b = Bench()
    b.restored()
    assert b.drained(10) == [10]
    b.on(m.Noticed(kind=NoticeKind.WALLTIME, stop=True, deadline=b.now + 10.0))
    b.on(m.StopReached(iteration=10))
    b.on(m.RanksEnded(verdict=OK))
    assert not any(isinstance(action, m.Continue) for action in b.on(m.Tick(), 1.0))
    assert any(isinstance(action, m.Continue) for action in b.on(m.Tick(), 6.0))


def test_the_same_trouble_is_told_once():
    b = Bench()
    b.restored()

    def told(problem: str) -> list[str]:
        actions = b.on(m.Pruned(problem=problem))
        return [str(a.fields["words"]) for a in actions if isinstance(a, m.Report) and a.event == "prune_failed"]

    assert [told(problem) for problem in ("a", "a", "b", "", "b")] == [["a"], [], ["b"], [], ["b"]]
