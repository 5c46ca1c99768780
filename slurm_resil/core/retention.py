"""Which checkpoints on the parallel file system stay. Pure: no file is looked at here.

A checkpoint stays if any rule asks for it; the newest always does, so that training can go on from it. Only what is
durable is given to these rules: nothing goes before its successor has that level. For every order in which checkpoints
come, deleting after each one leaves the same as deleting once at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_resil.core.errors import UsageError

ALL = 10**11  # ``keep_last``: more than a run has
METRIC = re.compile(r"[^\s:]{1,100}")


@dataclass(frozen=True, kw_only=True)
class Best:
    """Keep the best by a metric.

    Attributes:
        metric: Its name.
        largest: Whether the largest value is the best, or the smallest.
        count: How many stay.
    """

    metric: str
    largest: bool = False
    count: int = 1

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.largest else 'min'}" + (f":{self.count}" if self.count != 1 else "")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What stays; None: no such rule. Without any rule everything does.

    Attributes:
        keep_last: The newest so many; ``ALL``: everything. 1 if there are other rules only.
        every_iterations: Those whose iteration is a multiple of it.
        every_s: The first of each period of so many seconds of the wall clock (3600: of each full hour, UTC).
        best: The best by a metric.
    """

    keep_last: int | None = None
    every_iterations: int | None = None
    every_s: float | None = None
    best: Best | None = None

    @property
    def deletes(self) -> bool:
        """Whether anything ever goes."""
        return self != Retention() and (self.keep_last or 1) < ALL

    @property
    def last(self) -> int:
        """How many of the newest stay."""
        return max(1, self.keep_last or 1)

    def __str__(self) -> str:
        if not self.deletes:
            return "everything"
        words = [f"the last {self.last}" if self.last > 1 else "the last one"]
        words += [f"every {self.every_iterations} iterations"] if self.every_iterations else []
        words += [f"the first of every {self.every_s:g} s"] if self.every_s else []
        words += [f"the best by {self.best}"] if self.best else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A durable checkpoint, as the rules see it.

    Attributes:
        iteration: Which.
        created_s: When it was published, Unix seconds.
        metrics: Metrics by name.
        by_hand: Whether a person wants it kept.
    """

    iteration: int
    created_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_hand: bool = False


def judge(
    checkpoints: Iterable[Checkpoint], retention: Retention, *, newest: int | None = None
) -> dict[int, tuple[str, ...]]:
    """Say of every checkpoint why it stays; one without a reason goes.

    Args:
        checkpoints: All that are durable and whole.
        retention: Rules.
        newest: Newest iteration that training is known to have reached from what it restored; default: the newest one.
            What is above it is of another past, or of nobody's: it counts for no rule, and it stays.
    """
    ordered = sorted(checkpoints, key=lambda one: -one.iteration)
    reasons: dict[int, list[str]] = {one.iteration: [] for one in ordered}
    counted = []
    for one in ordered:
        if newest is not None and one.iteration > newest:
            reasons[one.iteration].append(f"newer than iteration {newest}")
        else:
            counted.append(one)
        if one.by_hand:
            reasons[one.iteration].append("by hand")
    if not retention.deletes:
        for one in counted:
            reasons[one.iteration].append("everything is kept")
        return {iteration: tuple(words) for iteration, words in reasons.items()}
    for one in counted[: retention.last]:
        reasons[one.iteration].append(f"last {retention.last}" if retention.last > 1 else "newest")
    every = retention.every_iterations
    for one in counted:
        if every and one.iteration % every == 0:
            reasons[one.iteration].append(f"every {every}")
    if retention.every_s:
        for iteration in _first_of_each(counted, retention.every_s):
            reasons[iteration].append(f"first in {retention.every_s:g} s")
    if retention.best is not None:
        for iteration, words in _best(counted, retention.best).items():
            reasons[iteration].append(words)
    return {iteration: tuple(words) for iteration, words in reasons.items()}


def _first_of_each(newest_first: Iterable[Checkpoint], every_s: float) -> list[int]:
    first: dict[int, int] = {}
    for one in newest_first:
        if math.isfinite(one.created_s):
            first[math.floor(one.created_s / every_s)] = one.iteration
    return list(first.values())


def _best(newest_first: Iterable[Checkpoint], best: Best) -> dict[int, str]:
    """The best ones; of equal ones the newer. While none has the metric, all stay: its name may be a slip."""
    values = {one.iteration: one.metrics.get(best.metric, math.nan) for one in newest_first}
    known = [iteration for iteration, value in values.items() if math.isfinite(value)]
    if not known:
        return dict.fromkeys(values, f"no checkpoint has the metric {best.metric}")
    known.sort(key=lambda iteration: -values[iteration] if best.largest else values[iteration])
    return dict.fromkeys(known[: best.count], f"best {best.metric}")


def parse_last(text: str) -> int:
    """Read ``keep_last``: a number or ``all``.

    Raises:
        UsageError: It is neither.
    """
    if text == "all":
        return ALL
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) < ALL:
        raise UsageError(f"{text!r} is not how many checkpoints are kept", mend="a number from 1, as in 3, or all")
    return int(text)


def parse_best(text: str) -> Best:
    """Read ``METRIC:min``, ``METRIC:max``, or either with ``:N`` for the N best.

    Raises:
        UsageError: It is none of these.
    """
    metric, _, rest = text.partition(":")
    way, colon, digits = rest.partition(":")
    count = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 12 else 0
    if not METRIC.fullmatch(metric) or way not in ("min", "max") or (colon and not count):
        raise UsageError(f"{text!r} is no metric with its direction", mend="as in loss:min, accuracy:max or loss:min:3")
    return Best(metric=metric, largest=way == "max", count=count or 1)
