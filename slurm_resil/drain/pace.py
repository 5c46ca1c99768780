"""How fast a drain goes: the cap, which the launcher may lift meanwhile, and the pause while a checkpoint is taken.

The launcher says what it wants in ``drain-orders.json`` in the run's directory. Rank 0 of the movers looks there about
twice a second and tells the others with the next round, so that an order holds within about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from slurm_resil.comm.base import Communicator
from slurm_resil.core import control, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.progress import Meter
from slurm_resil.core.throttle import Clock, SystemClock, Throttle
from slurm_resil.drain.orders import Inbox, Orders
from slurm_resil.drain.plan import Plan

PAUSE_S = 20.0  # longest pause for one checkpoint: one that never ends must not keep the last one from being safe
ROUND_BYTES = 1 << 20  # the least of a round, unless the cap or the buffer is smaller
_ROUNDS = 96  # at least so many, so that little is written again after a kill
_BUFFERS = 5  # one is written while the next is read; what is exchanged is sent, received and put together
_PAGE_BYTES = 4096
_POLL_S = 0.1


def taken(job_dir: str) -> int:
    """Iteration of the checkpoint that is being taken now as far as this node knows; 0 if there is none.

    From the commit of its proposal, or from the moment that the first rank has handed it over, until all ranks of the
    run have sealed it or it is given up.
    """
    try:
        page = control.ControlPage.open(paths.control(job_dir))
    except (OSError, DataError, ValueError):
        return 0
    try:
        words = page.words
        committed = words[control.PROPOSAL] if words[control.DECISION] == control.COMMIT else 0
        saved = max((words[page.block(rank) + control.SAVED] for rank in range(page.ranks)), default=0)
        target = max(committed, saved)
        return int(target) if target > max(words[control.SEALED_ALL], words[control.FAILED]) else 0
    finally:
        page.close()


def most_of_round(buffer_bytes: int, load_bytes: int) -> int:
    """The most that a mover writes in a round without a cap, bytes; ``load_bytes`` is what the busiest one writes."""
    most = max(buffer_bytes // _BUFFERS // _PAGE_BYTES * _PAGE_BYTES, _PAGE_BYTES)
    return min(most, max(ROUND_BYTES, load_bytes // _ROUNDS))


class Pace:
    """See the module.

    Args:
        comm: Movers.
        plan: Plan.
        orders: What holds at first, the same on all ranks.
        inbox: Where other orders come; rank 0 alone looks.
        job_dir: Job's directory in this node's burst buffer.
        buffer_bytes: Memory of a mover for data.
        stop: Asked while waiting; True ends the wait.
        heed: Hears of orders that have changed, on every rank.
        meter: Hears of waits.
        clock: Time.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        *,
        orders: Orders,
        inbox: Inbox,
        job_dir: str,
        buffer_bytes: int,
        stop: Callable[[], bool],
        heed: Callable[[Orders], None],
        meter: Meter,
        clock: Clock | None = None,
    ) -> None:
        self._comm, self._plan, self._inbox, self._job_dir = comm, plan, inbox, job_dir
        self._buffer_bytes, self._stop, self._heed, self._meter = buffer_bytes, stop, heed, meter
        self._clock = clock or SystemClock()
        self._orders = orders
        self._given_up = 0  # checkpoint for which the longest pause is over
        self._throttle = Throttle(None, 0, clock=self._clock, stop=self._still)
        self._apply()

    @property
    def most_bytes(self) -> int:
        """The most of a round without a cap, bytes."""
        return most_of_round(self._buffer_bytes, max(self._plan.loads))

    def round_bytes(self) -> int:
        """Most bytes of this mover in the next round; with a cap about a second's."""
        if self._orders.cap_bytes_s is None:
            return self.most_bytes
        most = max(self._plan.loads) / max(self._plan.nbytes, 1) * self._orders.cap_bytes_s
        return max(min(_PAGE_BYTES, self.most_bytes), min(self.most_bytes, int(most)))

    def wish(self) -> dict[str, Any] | None:
        """What is ordered, as rank 0 sees it; the others know of nothing."""
        if self._comm.rank:
            return None
        with self._meter.storage("looking for orders"):
            return asdict(self._inbox.look())

    def follow(self, wish: Mapping[str, Any]) -> None:
        """Do as rank 0 has said. Collective."""
        orders = Orders(**wish)
        if orders != self._orders:  # on all ranks or on none
            if self._comm.rank:
                self._follow(orders)
            self._comm.barrier()  # rank 0 tells that it is followed, so it is the last one
        self._follow(orders)

    def hear_alone(self) -> None:
        """Hear what is ordered while every mover works for itself and nothing is capped. Rank 0 alone gets to know."""
        if self._comm.rank == 0:
            self._follow(self._inbox.look())

    def _follow(self, orders: Orders) -> None:
        if orders != self._orders:
            self._orders = orders
            self._apply()
            self._heed(orders)

    def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be written."""
        self.pause()
        self._throttle.take(nbytes)

    def pause(self) -> None:
        """Wait while a checkpoint is being taken, for a bounded time. Not collective: every node knows by itself."""
        if self._orders.finish:
            return
        begin = self._clock.now()
        target = taken(self._job_dir)
        while target and target != self._given_up and not self._stop():
            waited = self._clock.now() - begin
            if waited > PAUSE_S:
                self._given_up = target
                return
            self._clock.sleep(_POLL_S)
            self._meter.waits(f"the checkpoint of iteration {target} is being taken", lost_s=_POLL_S)
            if self._comm.rank == 0 and self._inbox.look().finish:
                return
            target = taken(self._job_dir)

    def _still(self) -> bool:
        """Asked by the throttle now and then; rank 0 need not wait out a cap that was lifted."""
        self._meter.waits("the cap")
        ordered = self._inbox.look() if self._comm.rank == 0 else self._orders
        return self._stop() or (ordered.cap_bytes_s is None and self._orders.cap_bytes_s is not None)

    def _apply(self) -> None:
        cap = self._orders.cap_bytes_s
        if cap is None:
            self._throttle.limit(None, 0)
            return
        share = self._plan.loads[self._comm.rank] / max(self._plan.nbytes, 1)
        self._throttle.limit(max(cap * share, 1.0), self.round_bytes())
