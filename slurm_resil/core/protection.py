"""Which checkpoints of a job are protected, and how, and which are drained: what ``[redundancy] scheme`` says.

A list, each entry for every checkpoint or for every N-th one::

    xor                              every checkpoint by xor
    xor, rs:2 every 10               and every tenth by rs:2 instead
    xor,rs:2/10,drain/20             the same in short, and one in twenty is drained while training goes on

``auto`` stands for xor where there are two nodes or more and the burst buffer has room for the parity. It costs each
node one (n - 1)-th of its state in memory, for sets of n nodes, and its state once over the network; the loss of a
node, the most frequent fault that takes memory away, then costs no iteration that was protected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_resil.core.errors import UsageError
from slurm_resil.core.schemes import Scheme

AUTO = "auto"
MOST_EVERY = 10**6
MOST_MEMBERS = 128  # of a set
_DRAIN = "drain"
_ENTRY = re.compile(r"([a-z]+(?::[0-9]+)?)(?:(?:\s*/\s*|\s+every\s+)([0-9]{1,9}))?")
_MEND = "write auto, xor, rs:2, or a list with some for every N-th checkpoint only, as in xor,rs:2/10,drain/20"
_SINGLE = Scheme(kind="single", losses=0)


@dataclass(frozen=True, kw_only=True)
class Protection:
    """What is done for the checkpoints of a job.

    Checkpoints are counted from 0 in each attempt, so that a job that comes back often has its strong ones, too.

    Attributes:
        levels: Schemes, each with how many checkpoints go from one that gets it to the next.
        drain_every: One in so many is drained while training goes on. The one before an end always is.
        auto: Nobody chose: without room for parity there is no protection, and no error.
    """

    levels: tuple[tuple[Scheme, int], ...]
    drain_every: int = 1
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> Protection:
        """Read a list.

        Raises:
            UsageError: It is none, or an entry of it could never count.
        """
        levels: list[tuple[Scheme, int]] = []
        drains: list[int] = []
        entries = [entry.strip() for entry in text.lower().split(",")]
        for entry in entries:
            if entry == AUTO:
                continue
            match = _ENTRY.fullmatch(entry)
            if match is None:
                raise UsageError(f"{text!r}: {entry!r} is no redundancy scheme", mend=_MEND)
            every = int(match[2] or 1)
            if not 1 <= every <= MOST_EVERY:
                raise UsageError(f"{text!r}: every {every} checkpoints is not from 1 to {MOST_EVERY}", mend=_MEND)
            if match[1] == _DRAIN:
                drains.append(every)
            else:
                levels.append((_scheme(match[1], text), every))
        if len(drains) > 1 or entries.count(AUTO) > 1:
            raise UsageError(f"{text!r} says something twice", mend=_MEND)
        if levels and AUTO in entries:
            raise UsageError(f"{text!r}: auto is the choice of a scheme, and another one is named", mend=_MEND)
        _no_idle(levels, text)
        return cls(
            levels=tuple(levels) or ((Scheme.parse("xor"), 1),),
            drain_every=drains[0] if drains else 1,
            auto=not levels,
        )

    def scheme(self, number: int) -> Scheme:
        """How a checkpoint is protected: of all that are due, by the one that covers most losses.

        Args:
            number: Its place in this attempt, from 0.
        """
        due = [scheme for scheme, every in self.levels if number % every == 0]
        return max(due, key=lambda one: one.losses, default=_SINGLE)

    def drained(self, number: int) -> bool:
        """Whether a checkpoint is drained while training goes on."""
        return number % self.drain_every == 0

    @property
    def strongest(self) -> Scheme:
        """The scheme that covers most losses; it says how large sets must be."""
        return max((scheme for scheme, _ in self.levels), key=lambda one: one.losses)

    @property
    def usual(self) -> Scheme:
        """The scheme of the checkpoints that no rarer entry is due for."""
        return self.scheme(1)

    @property
    def protects(self) -> bool:
        """Whether any checkpoint is protected."""
        return self.strongest.losses > 0

    def __str__(self) -> str:
        words = [str(scheme) if every == 1 else f"{scheme}/{every}" for scheme, every in self.levels]
        words = [AUTO] if self.auto else words
        words += [f"{_DRAIN}/{self.drain_every}"] if self.drain_every != 1 else []
        return ",".join(words)


def _scheme(text: str, whole: str) -> Scheme:
    try:
        return Scheme.parse(text)
    except UsageError as error:
        words = error.message if whole == text else f"{whole!r}: {error.message}"
        raise UsageError(words, mend=_MEND) from error


def _no_idle(levels: list[tuple[Scheme, int]], text: str) -> None:
    """Refuse an entry that another one leaves no checkpoint to: whoever wrote it expects something of it."""
    for place, (scheme, every) in enumerate(levels):
        for other, (stronger, often) in enumerate(levels):
            covers = stronger.losses > scheme.losses or (stronger.losses == scheme.losses and other < place)
            if other != place and covers and every % often == 0:
                words = f"{text!r}: {scheme} for one in {every} never comes to be, {stronger} for one in {often} does"
                raise UsageError(words, mend="give the stronger one the larger number, as in xor,rs:2/10")


def contradiction(protection: Protection, set_size: int | None) -> str:
    """Why a scheme and a size of sets do not go together; empty if they do."""
    scheme = protection.strongest
    if set_size is None or set_size >= scheme.least_members:
        return ""
    return (
        f"scheme is '{protection}' and set_size is {set_size}: {scheme} covers the loss of {scheme.losses} nodes of a "
        f"set, which takes {scheme.least_members} at least, as in set_size = {2 * scheme.least_members}"
    )


# until the room that parity takes is looked at before it is taken, protection is for those who ask for it
USUAL = Protection.parse("single")
