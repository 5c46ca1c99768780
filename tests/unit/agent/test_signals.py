from __future__ import annotations

import signal

import pytest

from slurm_resil.agent.signals import SETTLE_S, GraceSignals
from slurm_resil.core.model import NoticeKind

TERM, CONT, USR1, USR2 = signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize(
    ("came", "kind"),
    [
        ([(TERM, 0.0)], NoticeKind.PREEMPTION),
        ([(CONT, 0.0), (TERM, 0.01)], NoticeKind.PREEMPTION),
        ([(TERM, 0.0), (CONT, 0.01)], NoticeKind.PREEMPTION),
        ([(CONT, 0.0), (USR2, 0.01)], NoticeKind.PREEMPTION),
        ([(USR2, 0.0), (CONT, 0.1)], NoticeKind.PREEMPTION),
        ([(USR1, 0.0)], NoticeKind.WALLTIME),
        ([(CONT, -60.0), (USR1, 0.0)], NoticeKind.WALLTIME),  # it was resumed a minute ago
    ],
)
def test_what_slurm_sends_is_one_notice(came: list[tuple[signal.Signals, float]], kind: NoticeKind) -> None:
    signals = GraceSignals()
    for number, at in came:
        signals.came(number, at)
    assert signals.poll(SETTLE_S / 2) is None
    notice = signals.poll(2 * SETTLE_S)
    assert notice is not None
    assert (notice.kind, notice.stop) == (kind, True)
    for number in (TERM, CONT, TERM):  # the kill at the end
        signals.came(number, 20.0)
    assert signals.poll(30.0) is None


def test_a_job_that_was_resumed_goes_on() -> None:
    signals = GraceSignals()
    signals.came(CONT, 0.0)
    assert signals.poll(100.0) is None
