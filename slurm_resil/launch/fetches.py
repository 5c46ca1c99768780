"""The drained checkpoint that is staged on the nodes while the ranks of an attempt start. Pure; a part of the policy.

It is a help: nothing waits for it but the ranks, and those not longer than it gets on. It begins with the attempt, and
ends when the ranks have restored. Whether the nodes need anything it sees for itself.
"""

from __future__ import annotations

from slurm_resil.launch import moves as m


class Fetches:
    """See the module.

    Args:
        iteration: What is staged at the start of the attempt; 0: nothing.
    """

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._moving = False
        self._why = ""

    def start(self) -> list[m.Action]:
        """The attempt begins."""
        self._moving = self._iteration > 0
        return [m.Fetch(iteration=self._iteration)] if self._moving else []

    def cancel(self, why: str) -> list[m.Action]:
        """Stop it: it is of no more use."""
        if not self._moving or self._why:
            return []
        self._why = why
        return [m.CancelFetch(why=why)]

    def ended(self, event: m.MoverEnded) -> list[m.Action]:
        """Hear how it ended."""
        self._moving = False
        name = "fetched" if event.ok else "fetch_cancelled" if self._why else "fetch_failed"
        words = event.words if event.ok or not self._why else self._why
        fields = {"iteration": event.iteration, "seconds": round(event.duration_s, 3), "words": words}
        return [m.Report(event=name, fields=fields)]
