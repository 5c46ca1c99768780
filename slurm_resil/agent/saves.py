"""Which ranks have sealed which iteration: pure."""

from __future__ import annotations

KEEP = 64  # iterations that are looked after at a time


class Saves:
    """Seals of one cycle.

    Attributes:
        newest: Newest iteration that all ranks have sealed, 0 for none.
    """

    def __init__(self, world_size: int, newest: int = 0) -> None:
        self._world = world_size
        self._sealed: dict[int, set[int]] = {}
        self._failed: set[int] = set()
        self._since: dict[int, float] = {}
        self.newest = newest

    def sealed(self, iteration: int, rank: int, now: float) -> bool:
        """Hear that a rank has sealed; True when that makes the iteration complete, for the first time."""
        if iteration <= self.newest or iteration in self._failed or not 0 <= rank < self._world:
            return False
        ranks = self._sealed.setdefault(iteration, set())
        self._since.setdefault(iteration, now)
        ranks.add(rank)
        return len(ranks) == self._world and self.complete(iteration)

    def failed(self, iteration: int) -> bool:
        """Hear that an iteration cannot become complete; True for the first time."""
        if iteration <= self.newest or iteration in self._failed:
            return False
        self._sealed.pop(iteration, None)
        self._since.pop(iteration, None)
        self._failed.add(iteration)
        for old in sorted(self._failed)[:-KEEP]:
            self._failed.discard(old)
        return True

    def complete(self, iteration: int) -> bool:
        """Hear from an agent that all ranks have sealed an iteration; True if that is news."""
        if iteration <= self.newest:
            return False
        self.newest = iteration
        self._forget(iteration)
        return True

    @property
    def given_up(self) -> list[int]:
        """Iterations above the newest complete one that will not become complete."""
        return sorted(self._failed)

    def has_failed(self, iteration: int) -> bool:
        """Whether the iteration was given up."""
        return iteration in self._failed

    def overdue(self, now: float, wait_s: float) -> list[int]:
        """Iterations of which the first seal is older than ``wait_s`` seconds."""
        return [iteration for iteration, since in self._since.items() if now >= since + wait_s]

    def since(self, iteration: int) -> float | None:
        """When the first rank had sealed it."""
        return self._since.get(iteration)

    def _forget(self, complete: int) -> None:
        # ranks save in order, so what is older and incomplete was skipped by somebody
        self._sealed = {one: ranks for one, ranks in self._sealed.items() if one > complete}
        self._since = {one: since for one, since in self._since.items() if one > complete}
        self._failed = {one for one in self._failed if one > complete}
