import random
import signal

import pytest

from slurm_resil.core.model import Level, NoticeKind
from slurm_resil.core.schemes import Scheme
from slurm_resil.launch import moves as m
from slurm_resil.launch.guard import AttemptRecord
from slurm_resil.launch.policy import Phase, Policy, Rules
from slurm_resil.launch.verdict import Verdict

NODES = ("n1", "n2", "n3")
OK = Verdict(code=0, words="all ranks ended well")
BAD = Verdict(code=7, rank=2, node="n3", words="exited with code 7")


class Bench:
    """A policy with a clock, and what it asked for."""

    def __init__(self, **kwargs):
        rules = kwargs.pop("rules", Rules())
        self.policy = Policy(NODES, rules, **kwargs)
        self.now = 100.0
        self.asked = self.policy.start()

    def on(self, event, after=0.0):
        self.now += after
        actions = [a for a in self.policy.on(event, self.now) if not isinstance(a, m.Report)]
        self.asked += actions
        return actions

    def tick(self, seconds):
        end, actions = self.now + seconds, []
        while self.now < end:
            actions += self.on(m.Tick(), 0.5)
        return actions

    def encoded(self, iteration, ok=True, seconds=1.0, **fields):
        return self.on(m.MoverEnded(kind="encode", iteration=iteration, ok=ok, duration_s=seconds, **fields), seconds)

    def drained(self, iteration, ok=True, seconds=2.0):
        return self.on(m.MoverEnded(iteration=iteration, ok=ok, duration_s=seconds, words=""), seconds)

    def probed(self, *dead):
        return self.on(m.Probed(alive={node: node not in dead for node in NODES}), 0.1)

    def notice(self, kind=NoticeKind.PREEMPTION, deadline=15.0):
        return self.on(m.Noticed(kind=kind, stop=True, deadline=self.now + deadline if deadline else None))


class Chosen:
    """Schemes by the number of the checkpoint, and one in so many is drained while training goes on."""

    protects = True

    def __init__(self, *schemes, drain_every=1):
        self.schemes, self.drain_every = [Scheme.parse(scheme) for scheme in schemes], drain_every

    def scheme(self, number):
        return self.schemes[number % len(self.schemes)]

    def drained(self, number):
        return number % self.drain_every == 0


def kinds(actions):
    return [type(action) for action in actions]


def test_normal_life_drains_the_newest_and_ends_well():
    b = Bench()
    assert b.asked == [m.StartCycle(cycle=0)]
    assert b.on(m.SealedAll(iteration=10)) == [m.Drain(iteration=10, capped=True)]
    assert b.on(m.SealedAll(iteration=20)) == []  # one mover at a time
    assert b.on(m.SealedAll(iteration=30)) == []
    assert b.drained(10) == [m.TellDurable(iteration=10, seconds=2.0)]
    assert b.tick(1.0) == []  # at most half of the time
    assert b.tick(2.0) == [m.Drain(iteration=30, capped=True)]  # newest wins, 20 never goes
    b.drained(30)
    assert b.on(m.RanksEnded(verdict=OK)) == [m.Finish(code=0, words=OK.words, done=True)]


def test_end_drains_what_is_not_durable_yet():
    b = Bench()
    b.on(m.SealedAll(iteration=10))
    b.on(m.SealedAll(iteration=20))
    assert kinds(b.on(m.RanksEnded(verdict=OK))) == [m.CancelDrain]
    assert b.tick(1.0) == []  # once
    b.drained(10, ok=False)
    assert m.Drain(iteration=20, capped=False) in b.asked
    actions = b.drained(20)
    assert actions[-1] == m.Finish(code=0, words=OK.words, done=True)


def test_a_last_checkpoint_that_cannot_be_drained_is_said_and_fails_the_job():
    b = Bench()
    b.on(m.SealedAll(iteration=10))
    b.on(m.RanksEnded(verdict=OK))
    for _ in range(6):
        if b.policy.drains.moving:
            b.drained(b.policy.drains.moving, ok=False)
        b.tick(4)
    finish = b.asked[-1]
    assert isinstance(finish, m.Finish)
    assert finish.code == 1
    assert "burst buffer only" in finish.words
    assert not finish.done


def test_stop_saves_drains_waits_for_the_ranks_and_continues():
    b = Bench()
    assert b.notice() == []
    assert b.on(m.StopReached(iteration=44), 1.0) == [m.Drain(iteration=44, capped=False)]
    assert b.on(m.RanksEnded(verdict=OK), 0.5) == []
    actions = b.drained(44)
    assert actions == [
        m.TellDurable(iteration=44, seconds=2.0),
        m.Continue(reason="preemption", iteration=44, level=Level.DURABLE),
    ]
    assert b.on(m.Continued(accepted=True)) == [m.Goodbye()]
    assert b.policy.phase is Phase.WAITING
    # never leaves before it is killed: on 22.05 the job would be COMPLETED
    assert b.tick(30) == []
    assert b.on(m.Asked(signum=signal.SIGTERM)) == [m.Finish(code=75, words="the job starts again")]


def test_stop_interrupts_a_capped_drain_of_an_older_checkpoint():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    assert b.notice() == [m.HurryDrain(iteration=40, finish=False)]  # perhaps nothing newer comes
    assert b.notice(kind=NoticeKind.WALLTIME) == []  # once
    assert kinds(b.on(m.StopReached(iteration=44))) == [m.CancelDrain]
    assert b.drained(40, ok=False) == [m.Drain(iteration=44, capped=False)]


def test_at_the_deadline_the_requeue_goes_out_with_what_there_is():
    b = Bench()
    b.notice(deadline=15.0)
    b.on(m.StopReached(iteration=44), 1.0)
    assert b.tick(9.0) == []
    actions = b.tick(1.5)
    assert kinds(actions) == [m.KillRanks, m.CancelDrain, m.Continue]
    assert actions[-1] == m.Continue(reason="preemption", iteration=44, level=Level.LOCAL)


def test_d3_ranks_that_never_arrive_the_last_sealed_checkpoint_is_drained_in_time():
    b = Bench()
    b.policy.drains._next = 1e9  # not by cadence
    b.on(m.SealedAll(iteration=40))
    b.notice(deadline=20.0)
    assert b.tick(9.0) == []
    assert b.tick(2.0) == [m.Drain(iteration=40, capped=False)]
    b.drained(40, seconds=2.0)
    actions = b.tick(5.0)
    assert kinds(actions) == [m.KillRanks, m.Continue]
    assert actions[-1].level is Level.DURABLE


def test_ranks_that_linger_after_a_saved_stop_are_killed():
    b = Bench()
    b.notice(kind=NoticeKind.WALLTIME, deadline=100.0)
    b.on(m.StopReached(iteration=44))
    b.drained(44)
    assert b.tick(9.0) == []
    assert kinds(b.tick(2.0)) == [m.KillRanks, m.Continue]


def test_d6_a_job_that_cannot_be_requeued_saves_and_exits_75_with_the_reason():
    b = Bench(rules=Rules(can_continue=False, why_not="it was submitted with --no-requeue"))
    b.notice()
    b.on(m.StopReached(iteration=44))
    b.on(m.RanksEnded(verdict=OK))
    finish = b.drained(44)[-1]
    assert finish.code == 75
    assert "--no-requeue" in finish.words
    assert "durable" in finish.words


def test_a_person_who_asks_to_stop_gets_a_checkpoint_and_no_requeue():
    b = Bench()
    assert b.on(m.Asked(signum=signal.SIGINT)) == [
        m.Notify(kind=NoticeKind.PERSON, deadline_in_s=None, source="launcher got SIGINT")
    ]
    b.notice(kind=NoticeKind.PERSON, deadline=None)
    b.on(m.StopReached(iteration=3))
    b.on(m.RanksEnded(verdict=OK))
    finish = b.drained(3)[-1]
    assert finish.code == 75
    assert "as asked" in finish.words


def test_two_interrupts_end_it_now():
    b = Bench()
    b.on(m.Asked(signum=signal.SIGINT))
    assert kinds(b.on(m.Asked(signum=signal.SIGINT))) == [m.KillRanks, m.Finish]
    assert b.asked[-1].code == 130


def test_sigterm_and_preemption_together_still_continue():
    b = Bench()
    b.on(m.Asked(signum=signal.SIGTERM))
    b.notice(kind=NoticeKind.PERSON, deadline=30)
    b.notice(kind=NoticeKind.PREEMPTION, deadline=12)
    b.on(m.StopReached(iteration=5))
    b.on(m.RanksEnded(verdict=OK))
    assert isinstance(b.drained(5)[-1], m.Continue)


@pytest.mark.parametrize(("sealed", "code"), [([], 1), ([10], 0), ([30], 0)])
def test_a_training_that_could_save_nothing_does_not_end_well(sealed, code):
    b = Bench()
    for iteration in (10, 20, 30):
        if iteration in sealed:
            b.on(m.SealedAll(iteration=iteration))
            b.drained(iteration)
        else:
            b.on(m.SaveFailed(iteration=iteration, why="rank 0: no room"))
    (finish,) = b.on(m.RanksEnded(verdict=OK))
    assert finish.code == code
    assert ("no room" in finish.words) is (sealed != [30])


def test_a_drain_that_newer_saves_have_overtaken_is_no_failure():
    b = Bench()
    b.on(m.SealedAll(iteration=10))
    b.on(m.SealedAll(iteration=20))
    assert m.Drain(iteration=20, capped=True) in b.drained(10, ok=False) + b.tick(5)  # its slot was taken meanwhile
    for _ in range(3):  # the newest one is given up after its tries, and is not tried for ever
        b.drained(20, ok=False)
        b.tick(5)
    assert b.policy.drains.moving is None


def test_node_loss_is_confirmed_then_continued_without_the_node():
    b = Bench()
    b.on(m.SealedAll(iteration=40))
    b.drained(40)
    b.on(m.SealedAll(iteration=50), 5.0)
    assert b.policy.drains.moving == 50
    assert kinds(b.on(m.NodeLost(node="n2", why="connection closed"))) == [m.Probe]
    actions = b.probed("n2")
    assert kinds(actions) == [m.KillRanks, m.CancelDrain, m.Continue]
    # 50 was sealed but only the dead node had its part of it
    assert actions[-1] == m.Continue(reason="node_loss", bad_nodes=("n2",), iteration=40, level=Level.DURABLE)


def test_n4_a_silent_agent_on_a_healthy_node_is_only_a_dead_agent():
    b = Bench()
    for _ in range(2):
        b.on(m.NodeLost(node="n2", why="no heartbeat for 5 s"))
        assert b.probed() == [m.RestartAgent(node="n2")]
    b.on(m.NodeLost(node="n2", why="no heartbeat for 5 s"))
    assert kinds(b.probed()) == [m.KillRanks]  # bounded
    b.on(m.RanksEnded(verdict=Verdict(code=137, rank=1, words="rank 1 was killed")))
    # the next cycle needs that agent as well
    assert b.probed() == [m.RestartAgent(node="n2"), m.StartCycle(cycle=1)]
    assert b.policy.budget.last == ((None, 1), None)  # no rank is blamed for it


def test_agents_that_die_now_and_then_are_always_started_again():
    b = Bench()
    for number in range(1, 20):
        b.on(m.SealedAll(iteration=10 * number))
        b.on(m.NodeLost(node="n2", why="its connection broke"))
        assert m.RestartAgent(node="n2") in b.probed()
        b.on(m.NodeJoined(node="n2"))


@pytest.mark.parametrize("first", ["agent", "ranks"])
def test_an_agent_that_dies_with_the_ranks_is_started_again(first):
    b = Bench()
    events = [m.NodeLost(node="n3", why="its connection broke"), m.RanksEnded(verdict=BAD)]
    for event in events if first == "agent" else events[::-1]:
        b.on(event)
    actions = b.probed()
    assert m.RestartAgent(node="n3") in actions
    assert actions[-1] == m.StartCycle(cycle=1)


def test_agents_that_can_never_start_end_the_job_with_their_reason():
    b = Bench()
    actions = b.on(m.AgentsRefused(code=78, words="no agent can start: cannot use the burst buffer /bb"))
    assert kinds(actions) == [m.KillRanks, m.Finish]
    assert (actions[-1].code, "/bb" in actions[-1].words) == (78, True)


def test_an_agent_that_comes_back_before_the_answer_is_left_alone():
    b = Bench()
    b.on(m.NodeLost(node="n2", why="its connection broke"))
    b.on(m.NodeJoined(node="n2"))
    assert b.probed() == []


def test_slurmd_that_restarts_is_no_dead_node_while_its_agent_is_heard():
    b = Bench()
    b.on(m.RanksEnded(verdict=BAD))
    for _ in range(3):
        assert b.probed("n2") == [m.Probe(why="n2: slurmd is silent, its agent is not", delay_s=1.0)]
    assert b.probed() == [m.StartCycle(cycle=1)]


def test_ranks_that_fail_because_their_node_died_are_a_node_loss():
    b = Bench()
    assert kinds(b.on(m.RanksEnded(verdict=BAD))) == [m.Probe]
    assert kinds(b.probed("n3")) == [m.Probe]
    b.on(m.NodeLost(node="n3", why="no heartbeat for 5 s"))
    assert kinds(b.probed("n3")) == [m.KillRanks, m.Continue]


def test_failing_ranks_restart_in_the_allocation_up_to_the_budget():
    b = Bench(rules=Rules(max_restarts=2))
    delays = []
    for cycle in range(3):
        b.on(m.Restored(iteration=0, cycle=cycle))
        b.on(m.RanksEnded(verdict=BAD, at=10 + 5 * cycle))
        delays += [a.delay_s for a in b.probed() if isinstance(a, m.StartCycle)]
    assert delays == [0.0, 1.0]
    finish = b.asked[-1]
    assert isinstance(finish, m.Finish)
    assert finish.code == 7
    assert "2 restarts" in finish.words


def test_the_same_failure_at_the_same_iteration_is_not_tried_three_times():
    b = Bench()
    for _ in range(2):
        b.on(m.RanksEnded(verdict=BAD, at=57))
        b.probed()
    assert isinstance(b.asked[-1], m.Finish)
    assert b.asked[-1].code == 7


def test_d9_attempts_without_progress_hold_the_job():
    past = [AttemptRecord(attempt=n, restored=20) for n in range(3)]
    b = Bench(history=past)
    actions = b.on(m.Restored(iteration=20, cycle=0))
    assert kinds(actions) == [m.KillRanks, m.Hold]
    assert "3 attempts" in actions[-1].reason


def test_restored_from_burst_buffers_is_drained_now_that_there_is_time():
    b = Bench(durable=40)
    assert b.on(m.Restored(iteration=44, cycle=0, durable=40)) == [m.Drain(iteration=44, capped=True)]


def test_a_bad_drained_checkpoint_does_not_count_as_durable():
    b = Bench(durable=60)
    b.on(m.Restored(iteration=40, cycle=0, durable=40))
    assert b.on(m.SealedAll(iteration=50)) == [m.Drain(iteration=50, capped=True)]


def test_a_grace_period_of_unknown_length_is_at_least_kill_wait():
    b = Bench(rules=Rules(kill_wait_s=20.0))
    b.notice(deadline=None)
    b.on(m.StopReached(iteration=44))
    assert m.Continue not in kinds(b.tick(14.0))
    assert m.Continue in kinds(b.tick(3.0))


def test_a_known_deadline_replaces_the_assumed_one():
    b = Bench(rules=Rules(kill_wait_s=20.0))
    b.notice(deadline=None)
    b.notice(deadline=200.0)
    b.on(m.StopReached(iteration=44))
    assert m.Continue not in kinds(b.tick(100.0))


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_keeps_the_invariants(seed):
    rng = random.Random(seed)
    b = Bench(rules=Rules(can_continue=rng.random() < 0.7), chosen=rng.choice([None, Chosen("xor")]))
    sealed, moving, handed_over, encoding = 0, None, False, None
    for _ in range(120):
        choice = rng.randrange(13)
        if choice == 0:
            sealed += 1
            event = m.SealedAll(iteration=sealed)
        elif choice == 1:
            event = m.Noticed(kind=rng.choice(list(NoticeKind)), stop=rng.random() < 0.3, deadline=b.now + 10)
        elif choice == 2 and sealed:
            event = m.StopReached(iteration=sealed)
        elif choice == 3:
            event = m.NodeLost(node=rng.choice(NODES), why="x")
        elif choice == 4:
            event = m.Probed(alive={node: rng.random() < 0.8 for node in NODES})
        elif choice == 5:
            event = m.RanksEnded(verdict=rng.choice([OK, BAD]), at=rng.randrange(3))
        elif choice == 6 and moving is not None:
            event, moving = m.MoverEnded(iteration=moving, ok=rng.random() < 0.7, duration_s=1.0), None
        elif choice == 7:
            event = m.Continued(accepted=rng.random() < 0.5)
        elif choice == 8 and encoding is not None:
            event = m.MoverEnded(kind="encode", iteration=encoding, ok=rng.random() < 0.7, duration_s=1.0)
            encoding = None
        elif choice == 9 and sealed:
            event = m.Restored(iteration=sealed, cycle=1, durable=b.policy.drains.durable)
        elif choice == 10 and moving is not None:
            event = m.DrainBegan(iteration=moving)
        elif choice == 11 and moving is not None:
            event = m.OrderTaken(iteration=moving, finish=rng.random() < 0.5)
        else:
            event = m.Tick()
        done = b.policy.phase is Phase.DONE
        actions = b.on(event, rng.random() * 2)
        assert not (done and actions)
        for action in actions:
            if isinstance(action, m.Drain):
                assert moving is None, "two movers"
                assert action.iteration > b.policy.drains.durable
                moving = action.iteration
            if isinstance(action, m.HurryDrain):
                assert action.iteration == moving
            if isinstance(action, m.Encode):
                assert encoding is None, "two encodes"
                assert action.iteration > max(b.policy.encodes.protected, b.policy.drains.durable)
                encoding = action.iteration
            if isinstance(action, m.StartCycle):
                assert not handed_over, "ranks started after the job was handed over"
            if isinstance(action, m.Continue | m.Hold):
                assert b.policy.rules.can_continue or isinstance(action, m.Hold)
                handed_over = True
        assert sum(isinstance(a, m.Finish) for a in b.asked) <= 1


@pytest.mark.parametrize("code", [2, 65, 77, 78, 126, 127])
def test_what_a_new_start_does_not_mend_is_not_started_again(code):
    b = Bench()
    b.on(m.RanksEnded(verdict=Verdict(code=code, task=0, rank=0, node="n1", words="rank 0 on n1 exited")))
    (finish,) = b.probed()
    assert (type(finish), finish.code) == (m.Finish, code)
    assert "end the same way" in finish.words and "rank 0 on n1" in finish.words


def test_ranks_that_do_not_fit_the_checkpoint_are_not_started_again_whatever_their_code():
    """A script around them may end with a code of its own."""
    b = Bench()
    b.on(m.RestoreFailed(why="StateError: another model", final=True))
    b.on(m.RanksEnded(verdict=Verdict(code=1, task=0, rank=0, node="n1", words="rank 0 on n1 exited with code 1")))
    (finish,) = b.probed()
    assert (type(finish), finish.code) == (m.Finish, 65)
    b = Bench()
    b.on(m.RestoreFailed(why="OSError: no memory"))
    b.on(m.RanksEnded(verdict=BAD))
    assert kinds(b.probed()) == [m.StartCycle]
