"""Deletes what the retention does not keep. Runs beside the training, never in a rank.

Everything is known before the first deletion, or nothing is deleted. Each iteration is deleted under the lease of its
drain: two who prune, or one who prunes and one who drains, never meet. Whoever is killed in between leaves checkpoints
that are whole, and files that the next one clears away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_resil.catalog import RunCatalog, Stock
from slurm_resil.core import paths, pins
from slurm_resil.core.errors import ResilError, ServiceError, SpaceError, TryAgainError
from slurm_resil.core.retention import Retention, judge
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.lease import path as lease_path

EVIDENCE_KEPT = 2  # bad checkpoints whose files stay for whoever looks into it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be deleted; iterations, oldest first.

    Attributes:
        why: Of every whole checkpoint, why it stays; those without a reason go.
        go: Checkpoints that go.
        evidence: Bad ones whose files go.
        unfinished: Those of which only the files of an interrupted drain or deletion go.
    """

    why: dict[int, tuple[str, ...]]
    go: tuple[int, ...] = ()
    evidence: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Pruned:
    """What was deleted.

    Attributes:
        deleted: Checkpoints.
        cleared: Iterations of which the files of bad or unfinished ones were deleted.
        nbytes: Size of all files.
        left: What should have been deleted and is in use, and why.
        failed: What could not be deleted, and why.
    """

    deleted: list[int] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    nbytes: int = 0
    left: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Pruner:
    """Deletes checkpoints of one run.

    Args:
        run_dir: Run's directory on the parallel file system.
        retention: What stays.
    """

    def __init__(self, run_dir: str, retention: Retention) -> None:
        self.run_dir, self.retention = run_dir, retention
        run_id = os.path.basename(os.path.abspath(run_dir))
        self._catalog = RunCatalog(run_dir, run_id=run_id)  # reads each manifest once: they never change

    def plan(self, *, newest: int | None = None) -> Plan:
        """See what would be deleted.

        Args:
            newest: See :func:`slurm_resil.core.retention.judge`.

        Raises:
            ServiceError: Something in the run's directory cannot be read: what is there is unknown.
        """
        try:
            stock = self._catalog.stock()
        except (OSError, ResilError) as error:
            raise ServiceError(
                f"nothing is deleted in {self.run_dir}, for not everything there can be read: {error}",
                mend="make it readable",
            ) from error
        return self._plan(stock, newest)

    def _plan(self, stock: Stock, newest: int | None) -> Plan:
        why = judge(stock.whole, self.retention, newest=newest)
        counted = [one.iteration for one in stock.whole if newest is None or one.iteration <= newest]
        if not self.retention.deletes or not counted:
            return Plan(why=why)
        before = counted[0]  # the newest whole one: what is older has a successor
        old = [iteration for iteration in stock.evidence[EVIDENCE_KEPT:] if iteration < before]
        rest = [iteration for iteration in stock.unfinished if iteration < before]
        return Plan(
            why=why,
            go=tuple(sorted(iteration for iteration, words in why.items() if not words)),
            evidence=tuple(sorted(old)),
            unfinished=tuple(sorted(rest)),
        )

    def prune(self, *, newest: int | None = None) -> Pruned:
        """Delete what the retention does not keep.

        Args:
            newest: See :func:`slurm_resil.core.retention.judge`.

        Raises:
            ServiceError: What is there is unknown; nothing was deleted.
        """
        plan, done = self.plan(newest=newest), Pruned()
        steps: list[tuple[tuple[int, ...], Callable[[int], int], list[int]]] = [
            (plan.unfinished, self._catalog.remove_unfinished, done.cleared),
            (plan.evidence, self._catalog.remove_evidence, done.cleared),
            (plan.go, self._catalog.remove, done.deleted),
        ]
        for iterations, remove, gone in steps:
            for iteration in iterations:
                try:
                    done.nbytes += self._remove(iteration, remove)
                    gone.append(iteration)
                except TryAgainError as error:
                    done.left[iteration] = error.message
                except ResilError as error:
                    done.failed[iteration] = error.message
        return done

    def _remove(self, iteration: int, remove: Callable[[int], int]) -> int:
        """Delete one; returns its size in bytes.

        Raises:
            TryAgainError: It is in use.
            ResilError: It could not be deleted.
        """
        if pins.shared(paths.drained(self.run_dir, iteration)):
            raise TryAgainError("somebody reads it")
        lease = None
        try:
            lease = Lease(self.run_dir, iteration, owner="retention")
        except SpaceError:
            # there is no room for the lease of a drain either; but one that is at work has its own
            if os.path.lexists(lease_path(self.run_dir, iteration)):
                raise
        try:
            if remove == self._catalog.remove and os.path.lexists(paths.drained_kept(self.run_dir, iteration)):
                raise TryAgainError("somebody wants it kept since a moment ago")
            return remove(iteration)
        except OSError as error:
            raise ResilError(f"{error.filename or self.run_dir}: {error.strerror}") from error
        finally:
            if lease is not None:
                lease.release()
