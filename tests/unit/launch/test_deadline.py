from dataclasses import replace

from slurm_resil.core.costs import Costs
from slurm_resil.core.errors import ServiceError
from slurm_resil.core.model import NoticeKind
from slurm_resil.launch.cluster import LocalCluster
from slurm_resil.launch.deadline import DeadlineWatch
from slurm_resil.slurm.job import JobRecord, read_times

JOB = {"start": "1000", "end": "1060", "limit": "1:00", "preempted": "N/A"}


class Answers(LocalCluster):
    """Slurm's answers, one after the other; None: it does not answer."""

    def __init__(self, *jobs: dict[str, str] | None) -> None:
        self.jobs = list(jobs)

    def record(self) -> JobRecord:
        job = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        if job is None:
            raise ServiceError("nobody answers")
        return replace(super().record(), times=read_times(**job))


def test_a_minute_is_enough_and_the_notice_comes_once() -> None:
    now = [1000.0]
    watch = DeadlineWatch(Answers(JOB), Costs(), clock=lambda: now[0])
    assert watch() == []
    now[0] = 1036.0
    assert [notice.kind for notice in watch()] == [NoticeKind.WALLTIME]
    assert watch() == []


def test_the_last_answer_stands_while_slurm_does_not_answer() -> None:
    now = [1000.0]
    watch = DeadlineWatch(Answers(JOB, None), Costs(), clock=lambda: now[0])
    assert watch() == []
    now[0] = 1040.0
    assert len(watch()) == 1


def test_no_answer_at_all_takes_no_action() -> None:
    watch = DeadlineWatch(Answers(None), Costs(), clock=lambda: 5000.0)
    assert watch() == []


def test_a_longer_limit_is_followed_and_preemption_comes_at_once() -> None:
    now = [1000.0]
    longer = {**JOB, "end": "9000", "limit": "2:13:20"}
    watch = DeadlineWatch(Answers(JOB, longer, {**longer, "preempted": "1100"}), Costs(), clock=lambda: now[0])
    assert watch() == []
    now[0] = 1059.0
    assert watch() == []
    now[0] = 1095.0
    assert [notice.kind for notice in watch()] == [NoticeKind.PREEMPTION]


def test_a_preemption_is_told_though_the_walltime_was() -> None:
    now = [1040.0]
    watch = DeadlineWatch(Answers(JOB, {**JOB, "end": "1052", "preempted": "1041"}), Costs(), clock=lambda: now[0])
    assert [notice.kind for notice in watch()] == [NoticeKind.WALLTIME]
    now[0] = 1041.0
    assert watch() == []  # not asked yet
    assert [(notice.kind, notice.deadline_s) for notice in watch(hurry=True)] == [(NoticeKind.PREEMPTION, 1052.0)]
    assert watch(hurry=True) == []
