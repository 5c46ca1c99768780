"""How often to checkpoint: the interval that loses the least time. Pure; all times in one unit, any.

d is the cost of a checkpoint (the stall of training, not what runs beside it), M the mean time between failures.
"""

from __future__ import annotations

import math


def _check(d: float, m: float) -> None:
    if not (math.isfinite(d) and math.isfinite(m) and d > 0 and m > 0):
        raise ValueError(f"cost {d} and mean time between failures {m} must be above 0")


def young(d: float, m: float) -> float:
    """Interval after Young: sqrt(2 d M).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974.
    """
    _check(d, m)
    return math.sqrt(2 * d * m)


def daly(d: float, m: float) -> float:
    """Interval after Daly, of higher order than Young's; M itself where a checkpoint costs 2 M or more.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
    """
    _check(d, m)
    if d >= 2 * m:
        return m
    return math.sqrt(2 * d * m) * (1 + math.sqrt(d / (2 * m)) / 3 + d / (9 * 2 * m)) - d


def optimum(d: float, m: float) -> float:
    """Exact optimum under exponentially distributed failures: M (1 + W0(-exp(-1 - d/M)))."""
    _check(d, m)
    return m * (1 + _lambert_w0(-math.exp(-1 - d / m)))


def wall_time(work: float, interval: float, d: float, restart: float, m: float) -> float:
    """Expected wall time of ``work`` with checkpoints every ``interval`` and a restart cost of ``restart``.

    Source: Daly 2006, complete model; all arguments in one unit, the result in that of ``work``.
    """
    _check(d, m)
    return m * math.exp(restart / m) * math.expm1((interval + d) / m) * work / interval


def several_levels(levels: list[tuple[float, float]]) -> tuple[list[float], float]:
    """Intervals of independent levels and the total overhead.

    Args:
        levels: (failures per time that need this level, cost of its checkpoint), each above 0.

    Returns:
        The interval of each level, and the fraction of the time that is lost.

    Source: Benoit et al., "Towards optimal multi-level checkpointing", hal-01339788.
    """
    for rate, cost in levels:
        _check(cost, rate)
    return [math.sqrt(2 * cost / rate) for rate, cost in levels], sum(
        math.sqrt(2 * rate * cost) for rate, cost in levels
    )


def iterations(interval: float, iteration: float) -> int:
    """Put an interval into whole iterations, at least one.

    Args:
        interval: Interval.
        iteration: Time of one iteration, in the same unit, above 0.
    """
    if not iteration > 0:
        raise ValueError(f"an iteration takes {iteration}, which is no time")
    return max(1, round(interval / iteration))


def _lambert_w0(x: float) -> float:
    """Principal branch of the Lambert W function for -1/e <= x <= 0, by Halley's method."""
    # series around the branch point, good enough everywhere on this range to start from
    p = math.sqrt(max(0.0, 2 * (math.e * x + 1)))
    w = -1 + p - p * p / 3 + 11 * p**3 / 72
    for _ in range(50):
        e = math.exp(w)
        f = w * e - x
        if f == 0 or w == -1:
            break
        step = f / (e * (w + 1) - (w + 2) * f / (2 * w + 2))
        w -= step
        if abs(step) <= 1e-15 * max(1.0, abs(w)):
            break
    return w
