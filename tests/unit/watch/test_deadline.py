from datetime import UTC, datetime

import pytest

from slurm_resil.core.model import EndTime, JobTimes, NoticeKind
from slurm_resil.watch.deadline import due, lead_s


def times(end_s: float, *, preempted: bool = False) -> JobTimes:
    return JobTimes(start_s=0.0, end=EndTime.known(datetime.fromtimestamp(end_s, UTC)), preempted=preempted)


@pytest.mark.parametrize(
    ("costs", "limit", "override", "lead"),
    [((), None, None, 30.0), ((), 60.0, None, 24.0), ((1.0, 2.0, 4.0), 60.0, None, 12.0), ((50.0,), 60.0, 7.0, 7.0)],
)
def test_the_lead_comes_from_what_was_measured(
    costs: tuple[float, ...], limit: float | None, override: float | None, lead: float
) -> None:
    assert lead_s(costs, limit_s=limit, override_s=override) == pytest.approx(lead)


def test_walltime_is_due_a_lead_before_the_end_and_follows_a_changed_limit() -> None:
    assert due(times(1000), 979, 20) is None
    notice = due(times(1000), 980, 20)
    assert notice is not None
    assert (notice.kind, notice.stop, notice.deadline_s) == (NoticeKind.WALLTIME, True, 1000)
    assert due(times(2000), 980, 20) is None


def test_preemption_is_due_at_once() -> None:
    notice = due(times(1000, preempted=True), 10, 20)
    assert notice is not None
    assert notice.kind == NoticeKind.PREEMPTION


@pytest.mark.parametrize("end", [EndTime.unknown(), EndTime.unlimited()])
def test_what_is_not_known_gives_no_notice(end: EndTime) -> None:
    assert due(JobTimes(start_s=0.0, end=end), 1e12, 1e6) is None
