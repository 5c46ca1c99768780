"""What is ordered of a drain that runs: to go on without a cap, to finish, to end. A file in the run's directory.

The launcher writes it at a deadline, and a person who does not want this drain to go on.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError
from slurm_resil.core.throttle import Clock, SystemClock

LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What is wanted of the drain of an iteration.

    Attributes:
        iteration: Which; orders for another one are none.
        cap_bytes_s: Limit of all movers together, bytes/s; None: none.
        finish: Go on through SIGTERM, and do not pause: there is a deadline.
        cancel: End; what is written stays for the next drain of this iteration.
    """

    iteration: int
    cap_bytes_s: float | None = None
    finish: bool = False
    cancel: bool = False

    def write(self, run_dir: str) -> None:
        """Give the orders.

        Raises:
            OSError: Storage refused.
        """
        fsio.write_json(paths.drain_orders(run_dir), asdict(self), sync=False)

    @classmethod
    def read(cls, run_dir: str, iteration: int) -> Orders | None:
        """Orders for an iteration; None if there are none that can be read."""
        try:
            raw = fsio.read_json(paths.drain_orders(run_dir), limit_bytes=1 << 16)
            found = cls(
                iteration=int(raw["iteration"]),
                cap_bytes_s=raw["cap_bytes_s"],
                finish=bool(raw["finish"]),
                cancel=bool(raw.get("cancel")),
            )
            if found.cap_bytes_s is not None and not found.cap_bytes_s > 0:
                return None
        except (OSError, DataError, KeyError, TypeError, ValueError):
            return None
        return found if found.iteration == iteration else None


def withdraw(run_dir: str) -> None:
    """Take back what was ordered of an earlier drain, if storage lets us."""
    with contextlib.suppress(OSError):
        os.unlink(paths.drain_orders(run_dir))


class Inbox:
    """Orders for the drain that runs, looked for about twice a second by who asks often.

    Args:
        run_dir: Run's directory.
        orders: What holds until there are others.
        clock: Time.

    Attributes:
        orders: What holds.
    """

    def __init__(self, run_dir: str, orders: Orders, *, clock: Clock | None = None) -> None:
        self._run_dir, self.orders = run_dir, orders
        self._clock = clock or SystemClock()
        self._looked = float("-inf")

    def look(self) -> Orders:
        """What holds now."""
        now = self._clock.now()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.orders = Orders.read(self._run_dir, self.orders.iteration) or self.orders
        return self.orders
