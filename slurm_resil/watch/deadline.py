"""When a checkpoint must begin so that it is safe before the job is killed. Pure: asking Slurm is the caller's part."""

from __future__ import annotations

from slurm_resil.core.model import JobTimes, Notice, NoticeKind

MARGIN_S = 5.0  # requeue and scheduling noise, beyond what was measured
FIRST_LEAD_S = 30.0  # before anything was measured
FIRST_SHARE = 0.4  # of a short job's time that the first lead may take


def lead_s(costs_p99_s: tuple[float, ...], *, limit_s: float | None, override_s: float | None = None) -> float:
    """Time before the end at which a checkpoint must begin.

    Args:
        costs_p99_s: Measured costs that must fit in: copy, seal, drain; seconds. Empty: nothing was measured.
        limit_s: Time that the job has in all, seconds; None without a limit.
        override_s: What the user or the site says instead.

    Returns:
        Seconds.
    """
    if override_s is not None:
        return override_s
    if costs_p99_s:
        return sum(costs_p99_s) + MARGIN_S
    return FIRST_LEAD_S if limit_s is None else min(FIRST_LEAD_S, FIRST_SHARE * limit_s)


def due(times: JobTimes, now_s: float, lead: float) -> Notice | None:
    """Say whether a checkpoint is due.

    Args:
        times: Last known times; an unknown end gives no notice.
        now_s: Unix time.
        lead: See :func:`lead_s`.

    Returns:
        A notice that asks to stop, or None.
    """
    if times.end.kind != "known" or times.end.at is None:
        return None
    end = times.end.at.timestamp()
    if times.preempted:
        return Notice(kind=NoticeKind.PREEMPTION, stop=True, deadline_s=end, source="Slurm's PreemptTime")
    if now_s < end - lead:
        return None
    return Notice(kind=NoticeKind.WALLTIME, stop=True, deadline_s=end, source="Slurm's EndTime")
