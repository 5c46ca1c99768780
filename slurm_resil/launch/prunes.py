"""When old checkpoints are deleted. Pure; a part of the policy.

After each drain, and once after each restore, for what the attempt before left behind; never while ranks load a
checkpoint. One deletion at a time. It keeps nobody from anything: the end of the job waits for it for a bounded time.
"""

from __future__ import annotations

from slurm_resil.launch import moves as m


class Prunes:
    """See the module.

    Args:
        wanted: Whether the retention deletes at all.
        wait_s: Longest wait for a deletion at the end, seconds.
    """

    def __init__(self, *, wanted: bool, wait_s: float) -> None:
        self._wanted, self._wait_s = wanted, wait_s
        self._newest = 0
        self._due = False
        self._since: float | None = None
        self._said = ""

    def ask(self, newest: int) -> None:
        """Want a deletion; ``newest`` was restored or has become durable just now: training goes on from it."""
        if self._wanted and newest:
            self._newest, self._due = newest, True

    def start(self, now: float, *, loading: bool) -> list[m.Action]:
        """Start one if it is due."""
        if not self._due or self._since is not None or loading:
            return []
        self._due, self._since = False, now
        return [m.Prune(newest=self._newest)]

    def ended(self, event: m.Pruned) -> list[m.Action]:
        """Hear how one ended."""
        self._since = None
        fields = {"iterations": list(event.deleted), "bytes": event.nbytes}
        actions: list[m.Action] = [m.Report(event="pruned", fields=fields)] if event.deleted else []
        if event.problem and event.problem != self._said:  # it is tried after each drain: once is enough
            actions.append(m.Report(event="prune_failed", fields={"words": event.problem}))
        self._said = event.problem
        return actions

    def busy(self, now: float) -> bool:
        """Whether the end should wait."""
        return self._due if self._since is None else now < self._since + self._wait_s
