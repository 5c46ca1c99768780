"""How an attempt asks for the next one, and how it ends then."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_policy import OK, Bench, kinds

from slurm_resil.core.model import Level
from slurm_resil.launch import moves as m


def test_an_attempt_that_slurm_counts_as_over_does_not_wait_for_a_kill_that_may_never_come():
    b = Bench()
    b.notice()
    b.on(m.StopReached(iteration=44))
    b.on(m.RanksEnded(verdict=OK))
    b.drained(44)
    assert kinds(b.on(m.Continued(accepted=True, already=True))) == [m.Goodbye, m.Finish]


def test_unanswered_requeue_is_asked_again_and_a_refused_one_is_not():
    b = Bench()
    b.notice()
    b.on(m.StopReached(iteration=4))
    b.on(m.RanksEnded(verdict=OK))
    request = b.drained(4)[-1]
    assert b.on(m.Continued(accepted=False, words="no answer")) == []
    assert b.tick(3.0) == [request]
    finish = b.on(m.Continued(accepted=False, final=True, words="cancelled by its owner"))[-1]
    assert finish.code == 75
    assert "cancelled" in finish.words


def test_an_engine_that_takes_the_job_over_and_does_nothing_is_passed_by():
    b = Bench()
    b.on(m.NodeLost(node="n2", why="x"))
    request = b.probed("n2")[-1]
    b.on(m.Continued(accepted=True))
    again = b.tick(61.0)
    assert again == [m.Continue(reason="node_loss", bad_nodes=request.bad_nodes, level=Level.DURABLE, alone=True)]


def stopped():
    """A bench whose ranks are gone and saved; the job is to go on."""
    b = Bench()
    b.notice()
    b.on(m.StopReached(iteration=44))
    b.on(m.RanksEnded(verdict=OK))
    assert kinds(b.drained(44))[-1] is m.Continue
    return b


def test_a_sigterm_that_is_faster_than_the_answer_is_the_end_if_slurm_says_so():
    b = stopped()
    assert b.on(m.Asked(signum=signal.SIGTERM)) == []
    assert kinds(b.on(m.Continued(accepted=True))) == [m.Goodbye, m.AskWhetherOver]
    finish = m.Finish(code=75, words="the job starts again")
    assert b.on(m.Continued(accepted=True, already=True)) == [finish]
    assert b.on(m.Asked(signum=signal.SIGTERM)) == []  # it is over


def test_one_that_comes_before_the_request_says_nothing_of_it():
    b = Bench()
    b.on(m.Asked(signum=signal.SIGTERM))
    b.notice()
    b.on(m.StopReached(iteration=44))
    b.on(m.RanksEnded(verdict=OK))
    b.drained(44)
    assert kinds(b.on(m.Continued(accepted=True))) == [m.Goodbye]
    assert b.on(m.Asked(signum=signal.SIGTERM)) == [m.Finish(code=75, words="the job starts again")]


def test_one_that_was_not_the_end_does_not_count_for_the_next_request():
    b = stopped()
    b.on(m.Asked(signum=signal.SIGTERM))
    assert m.AskWhetherOver in kinds(b.on(m.Continued(accepted=True)))
    assert m.Continue in kinds(b.tick(61.0))  # nobody has killed it
    assert kinds(b.on(m.Continued(accepted=True))) == [m.Goodbye]
