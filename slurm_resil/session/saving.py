"""Saves of one rank: a slot from the agent, the copy, the seal; and what became of them."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable

from slurm_resil.agent.link import RankLink
from slurm_resil.core.background import Background
from slurm_resil.core.errors import ServiceError, TryAgainError
from slurm_resil.core.log import event
from slurm_resil.core.metrics import Metrics
from slurm_resil.session.store import StateStore

SETTLE_S = 60.0  # for the copies of a lazy save
log = logging.getLogger(__name__)


class Saving:
    """See the module.

    Args:
        link: To the agent.
        store: How the state gets into a slot.
        rank: Global rank.
        lazy: Whether saves may be lazy: there is a thread for their copies then.
        strict: Whether a save that fails raises.

    Attributes:
        newest: Iteration of the newest save that was begun, 0 before the first.
        last_error: Why the newest failed save failed, empty if none has.
        skipped: How many saves found no slot.
    """

    def __init__(self, link: RankLink, store: StateStore, *, rank: int, lazy: bool, strict: bool) -> None:
        self._link, self._store, self._rank, self._strict = link, store, rank, strict
        self._late: Exception | None = None  # of a lazy save, for the caller
        self._prepared = False
        self.newest = self.skipped = 0
        self.last_error = ""
        self._background = Background("resil copies") if lazy else None
        if lazy:
            atexit.register(self.settle)  # the thread would end with the process

    def save(self, iteration: int, *, metrics: Metrics, wait_s: float, lazy: bool, fail: bool) -> bool:
        """Save; see ``Checkpointer.save``.

        Args:
            iteration: Number of complete iterations.
            metrics: What was said of the state; taken from there even if the save fails, for no later one is as good
                because of it.
            wait_s: For a slot, seconds.
            lazy: Let copies that can wait be done later.
            fail: Raise if no slot is free.

        Returns:
            Whether the state was, or will be, handed over.

        Raises:
            ResilError: It failed, and is to be said so.
        """
        if iteration == self.newest:
            return True
        said = metrics.take()
        if not self.settle():
            self._failed(iteration, "the copies of the save before are not done")
            return False
        try:
            try:
                index = self._link.lease(iteration, wait_s=wait_s)
            except ServiceError as error:
                raise TryAgainError(error.message, mend=error.mend) from error
            if lazy and self._background is not None:
                finish = self._store.start(index, iteration)
                self._background.put(lambda: self._hand_over(iteration, finish, said))
            else:
                self._link.seal(iteration, self._store.write(index, iteration), said)
        except TryAgainError as error:
            self.skipped += 1
            self._link.give_up(iteration, error.message)
            self._failed(iteration, f"{error.message} ({self.skipped} skipped so far)")
            if self._strict or fail:
                raise
            return False
        except Exception as error:
            # the state is the user's: whatever its parts raise, training goes on
            self._lost(iteration, error)
            if self._strict:
                raise
            return False
        self.newest = iteration
        return True

    def prepare(self, timeout_s: float) -> bool:
        """Have the free slots laid out and map them; see ``Checkpointer.prepare``.

        Raises:
            ResilError: With ``strict``: it could not be done.
        """
        self._prepared = True
        try:
            self._store.take(self._link.prepare(self._store.want(), timeout_s=timeout_s))
        except Exception as error:
            self.last_error = f"no slots were prepared: {error}"
            self._log(self.last_error)
            if self._strict:
                raise
            return False
        return True

    def prepare_soon(self) -> None:
        """Let the agent lay out the slots while training goes on; only the first call does anything."""
        if self._prepared:
            return
        self._prepared = True
        try:
            self._link.prepare_soon(self._store.want())
        except Exception as error:  # noqa: BLE001 -- the save will say it again, if it is still so
            event(log, "not_prepared", level=logging.WARNING, rank=self._rank, why=str(error))

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait for the lazy copies; False if they are not done in time."""
        return self._background is None or self._background.settle(timeout_s)

    def report(self) -> None:
        """Say what became of earlier saves.

        Raises:
            ResilError: With ``strict``: a lazy one failed.
        """
        for iteration, why in self._link.failures().items():
            self._failed(iteration, why)
        late, self._late = self._late, None
        if late is not None and self._strict:
            raise late

    def close(self, wait_s: float) -> None:
        """Wait until everything is sealed, and report what is not.

        Raises:
            ResilError: See :meth:`report`.
        """
        lost = [] if self.settle(wait_s) else [self.newest]
        for iteration in {*lost, *self._link.settle(wait_s)}:
            self._failed(iteration, f"not sealed {wait_s:g} s after the end")
        atexit.unregister(self.settle)
        if self._background is not None:
            self._background.close()
        self._store.close()
        self.report()

    def _hand_over(self, iteration: int, finish: Callable[[], str], metrics: dict[str, float]) -> None:
        """Thread of the lazy copies."""
        try:
            self._link.seal(iteration, finish(), metrics)
        except Exception as error:  # noqa: BLE001 -- kept for the caller
            self._lost(iteration, error)
            self._late = error

    def _lost(self, iteration: int, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        self._link.give_up(iteration, why)
        self._failed(iteration, why)
        log.debug("save_failed", exc_info=error)

    def _failed(self, iteration: int, why: str) -> None:
        self.last_error = f"save of iteration {iteration} failed: {why}"
        self._log(self.last_error)

    def _log(self, text: str) -> None:
        log.error("slurm-resil: rank %d: %s", self._rank, text)
