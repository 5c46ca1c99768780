"""How long storage that refuses is waited for. Pure."""

from __future__ import annotations

FIRST_S, MOST_S = 1.0, 15.0


class Patience:
    """Longer and longer waits, of a bounded sum; whoever gets on meanwhile has all of it again.

    Args:
        budget_s: The sum, seconds; 0: no wait at all.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = self.left_s = budget_s
        self._next_s, self._done = FIRST_S, 0

    def next(self, done_bytes: int) -> float | None:
        """Wait before the next try, seconds; None: give up.

        Args:
            done_bytes: How far it has come in all.
        """
        if done_bytes > self._done:
            self._done, self.left_s, self._next_s = done_bytes, self._budget_s, FIRST_S
        if self.left_s <= 0:
            return None
        wait = min(self._next_s, self.left_s)
        self.left_s -= wait
        self._next_s = min(2 * self._next_s, MOST_S)
        return wait
