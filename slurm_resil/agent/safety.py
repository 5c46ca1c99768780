"""What the leader knows of how safe the checkpoints of its run are, beyond the burst buffers. Pure."""

from __future__ import annotations

from slurm_resil.agent import protocol as p
from slurm_resil.core.model import Levels


class Safety:
    """See the module. What is heard is returned as the message for all agents."""

    def __init__(self) -> None:
        self._protected = self._durable = 0
        self._unprotected: set[int] = set()  # above the newest protected one

    def plan(self, plan: p.Plan) -> None:
        """Training goes on from there: newer checkpoints are of another past."""
        self._protected, self._durable = plan.protected, plan.durable
        self._unprotected.clear()

    def protected(self, iteration: int) -> p.Message:
        """Hear that an iteration survives the loss of nodes."""
        self._protected = max(self._protected, iteration)
        self._unprotected = {one for one in self._unprotected if one > iteration}
        return p.Protected(iteration=iteration)

    def unprotected(self, iteration: int) -> p.Message:
        """Hear that an iteration will not be protected."""
        self._unprotected.add(iteration)
        return p.Unprotected(iteration=iteration)

    def durable(self, iteration: int) -> p.Message:
        """Hear that an iteration is durable."""
        self._durable = max(self._durable, iteration)
        return p.Durable(iteration=iteration)

    def news(self) -> list[p.Message]:
        """All of it, for an agent that may not have heard it."""
        found: list[p.Message] = [p.Unprotected(iteration=one) for one in sorted(self._unprotected)]
        found += [p.Protected(iteration=self._protected)] if self._protected else []
        return found + ([p.Durable(iteration=self._durable)] if self._durable else [])

    def levels(self, local: int) -> Levels:
        """The newest iteration at each level, given the newest that all ranks have sealed."""
        return Levels(local=local, protected=max(self._protected, self._durable), durable=self._durable)
