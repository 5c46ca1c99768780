"""Shards that are rebuilt before the ranks restore. Pure; a part of the policy.

One at a time, for a bounded time; what becomes of it is told to the leader, which makes its plan from what is there.
"""

from __future__ import annotations

from slurm_resil.launch import moves as m


class Rebuilds:
    """See the module.

    Args:
        limit_s: Longest duration, seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._moving: int | None = None
        self._since = 0.0
        self._why = ""

    def start(self, event: m.RebuildWanted, now: float) -> list[m.Action]:
        """Hear that nodes lack shards."""
        self._moving, self._since, self._why = event.iteration, now, ""
        fields = {"iteration": event.iteration, "nodes": list(event.nodes)}
        return [m.Report(event="rebuild", fields=fields), m.Rebuild(iteration=event.iteration)]

    def tick(self, now: float) -> list[m.Action]:
        """Time has passed."""
        if self._moving is None or now < self._since + self._limit_s:
            return []
        return self.cancel(f"it took over {self._limit_s:g} s")

    def cancel(self, why: str) -> list[m.Action]:
        """Stop it."""
        if self._moving is None or self._why:
            return []
        self._why = why
        return [m.CancelRebuild(why=why)]

    def ended(self, event: m.MoverEnded) -> list[m.Action]:
        """Hear how it ended."""
        self._moving = None
        fields: dict[str, object] = {"iteration": event.iteration, "seconds": round(event.duration_s, 3)}
        if not event.ok:
            fields["words"] = self._why or event.words
        report = m.Report(event="rebuilt" if event.ok else "rebuild_failed", fields=fields)
        return [report, m.TellRebuilt(iteration=event.iteration, ok=event.ok)]
