from slurm_resil.launch.guard import AttemptRecord, RestartBudget, idle_attempts, why_hold
from slurm_resil.launch.verdict import Verdict


def history(*restored, held=()):
    return [AttemptRecord(attempt=n, restored=r, held=n in held) for n, r in enumerate(restored)]


def test_d9_attempts_without_progress_are_bounded():
    assert why_hold(history(), 0, 3) is None
    assert why_hold(history(0, 0), 0, 3) is None
    assert "3 attempts" in (why_hold(history(0, 0, 0), 0, 3) or "")


def test_progress_counts_from_the_last_gain():
    assert idle_attempts(history(0, 0, 10), 10) == 1
    assert idle_attempts(history(0, 10, 20), 30) == 0


def test_an_attempt_that_never_started_gained_nothing():
    assert why_hold(history(10, None, None), 10, 3) is not None


def test_falling_back_is_no_gain():
    assert idle_attempts(history(20, 20), 10) == 2


def test_counting_starts_anew_after_a_person_released_the_job():
    assert why_hold(history(0, 0, 0, 0, held={3}), 0, 3) is None


FAILED = Verdict(code=1, rank=2, words="rank 2 exited with code 1")
KILLED = Verdict(code=137, rank=1, words="rank 1 was killed")


def test_restarts_are_bounded_without_progress():
    budget, whys = RestartBudget(bound=3), []
    for _ in range(5):
        budget, why = budget.failed(KILLED, restorable=40, at=None)
        whys.append(why)
    assert whys[:3] == [None] * 3
    assert "3 restarts without progress" in whys[3]


def test_progress_fills_the_budget_again():
    budget = RestartBudget(bound=1)
    for restorable in (0, 10, 20, 30):
        budget, why = budget.failed(KILLED, restorable=restorable, at=None)
        assert why is None


def test_the_same_failure_at_the_same_iteration_stops_early():
    budget, why = RestartBudget(bound=3).failed(FAILED, restorable=40, at=57)
    assert why is None
    _, why = budget.failed(FAILED, restorable=40, at=58)  # the others may have got one further
    assert "iteration 58" in (why or "")


def test_another_rank_or_iteration_is_another_failure():
    budget, _ = RestartBudget(bound=3).failed(FAILED, restorable=40, at=57)
    assert budget.failed(FAILED, restorable=40, at=60)[1] is None
    assert budget.failed(FAILED, restorable=40, at=None)[1] is None
    assert budget.failed(KILLED, restorable=40, at=57)[1] is None
