"""Bounds on starting again: attempts and cycles that gain no iteration. Pure.

A cycle is a launch of the ranks inside an attempt; an attempt is one grant of nodes. Both may be repeated for ever
as long as the run gets on, and a few times only when it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_resil.launch.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """What one attempt started from.

    Attributes:
        attempt: Its number.
        restored: Iteration it restored, 0 for a fresh start; None if it ended before that was decided.
        held: Whether the guard held the job at that attempt: a person has released it since, so counting starts anew.
    """

    attempt: int
    restored: int | None
    held: bool = False


def idle_attempts(history: Sequence[AttemptRecord], restored: int) -> int:
    """Count the attempts just before this one that gained nothing.

    Args:
        history: Earlier attempts in order.
        restored: Iteration that this attempt restores.

    Returns:
        Number of attempts, newest backwards, that started from at least ``restored`` or never got to start.
    """
    count = 0
    for record in reversed(history):
        if record.held or (record.restored is not None and record.restored < restored):
            break
        count += 1
    return count


def why_hold(history: Sequence[AttemptRecord], restored: int, bound: int) -> str | None:
    """Say why the job must be held, or None if it may go on."""
    idle = idle_attempts(history, restored)
    if idle < bound:
        return None
    return f"{idle} attempts in a row gained no iteration beyond {restored}"


@dataclass(frozen=True, kw_only=True)
class RestartBudget:
    """Restarts of the ranks inside one attempt.

    Attributes:
        bound: Restarts allowed without progress.
        used: Restarts since the last progress.
        reached: Newest iteration that was restorable at the last failure.
        last: Failure before, with the iteration the ranks had reached.
    """

    bound: int
    used: int = 0
    reached: int = -1
    last: tuple[tuple[int | None, int], int | None] | None = None

    def failed(self, verdict: Verdict, *, restorable: int, at: int | None) -> tuple[RestartBudget, str | None]:
        """Count a failure.

        Args:
            verdict: How the ranks ended.
            restorable: Newest iteration that the next cycle can restore, 0 if none.
            at: Iteration that the ranks had reached, None if unknown.

        Returns:
            The new budget, and why there must be no restart (None: restart).
        """
        progress = restorable > self.reached and self.reached >= 0
        used = 0 if progress else self.used
        failure = (verdict.signature, at)
        if not verdict.launch_failed and _same(failure, self.last):
            why = f"the same failure twice at iteration {at}: {verdict.words}"
            return replace(self, used=used, reached=restorable, last=failure), why
        if used >= self.bound:
            why = f"{used} restarts without progress beyond iteration {restorable}: {verdict.words}"
            return replace(self, used=used, reached=restorable, last=failure), why
        return replace(self, used=used + 1, reached=restorable, last=failure), None


def _same(
    one: tuple[tuple[int | None, int], int | None], other: tuple[tuple[int | None, int], int | None] | None
) -> bool:
    """Whether two failures are the same: rank, code, and iteration (ranks may be one iteration apart)."""
    if other is None or one[1] is None or other[1] is None:
        return False
    return one[0] == other[0] and abs(one[1] - other[1]) <= 1
