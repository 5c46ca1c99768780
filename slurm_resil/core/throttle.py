"""Token bucket: keeps a mover within its part of the job's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Monotonic time, seconds, and waiting."""

    def now(self) -> float:
        """Seconds since some fixed time."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        """See Clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See Clock."""
        time.sleep(seconds)


class Throttle:
    """Token bucket.

    Args:
        rate_bytes_s: Bytes that become available each second; None: no limit.
        burst_bytes: Bytes available at the start and at most.
        clock: Time.
        stop: Asked while waiting; True ends the wait.
    """

    SLICE_S = 0.2

    def __init__(
        self,
        rate_bytes_s: float | None,
        burst_bytes: int,
        *,
        clock: Clock | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop = stop
        self._clock = clock or SystemClock()
        self._tokens = float(burst_bytes)
        self._at = self._clock.now()
        self.limit(rate_bytes_s, burst_bytes)

    def limit(self, rate_bytes_s: float | None, burst_bytes: int) -> None:
        """Change the limits; what was taken before was taken under the old ones, a debt is owed still."""
        if rate_bytes_s is not None and rate_bytes_s <= 0:
            raise ValueError(f"a rate of {rate_bytes_s} bytes/s never ends")
        self._rate, self._burst = rate_bytes_s, burst_bytes

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be written. More than the burst is a debt that later calls pay."""
        if self._rate is None:
            return
        self._refill(self._rate)
        self._tokens -= nbytes
        while self._tokens < -0.5 and not self._stop():
            self._clock.sleep(min(self.SLICE_S, max(1e-4, -self._tokens / self._rate)))
            self._refill(self._rate)

    def _refill(self, rate: float) -> None:
        now = self._clock.now()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * rate)
        self._at = now
