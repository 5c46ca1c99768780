"""Which slot a rank may write next.

Which iterations are expendable is for others to say, see :mod:`slurm_resil.agent.keeping`. Of these the oldest goes
first, unless somebody reads it (core.pins).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from slurm_resil.core import paths, pins

_NAME = re.compile(r"^(\d+)-(\d+)\.h5$")


def parse(name: str) -> tuple[int, int] | None:
    """(rank, index) of a slot file's name."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass
class _Slot:
    iteration: int = 0  # what it holds, or what is being written; 0 for nothing
    busy: bool = False  # being written or sealed
    preparing: bool = False  # being laid out
    refused: bool = False  # the rank could not write it the last time: space may be short for it, not for the others


class Slots:
    """Slots of one rank.

    Args:
        job_dir: Job's directory in the burst buffer.
        rank: Global rank.
        count: Number of slots.
        forget: Called before an iteration's shard is given away: its redundancy is then of no use any more.

    Attributes:
        count: Number of slots.
    """

    def __init__(
        self, job_dir: str, rank: int, count: int, forget: Callable[[int], None] = lambda iteration: None
    ) -> None:
        self._job_dir, self._rank, self.count, self._forget = job_dir, rank, count, forget
        self._slots = [_Slot() for _ in range(count)]

    def holds(self, index: int, iteration: int) -> None:
        """Say that a slot holds a sealed shard."""
        if index < len(self._slots):
            self._slots[index] = _Slot(iteration)

    def lease(self, iteration: int, expendable: Callable[[int], bool], *, last_try: bool = True) -> int | None:
        """Take a slot for an iteration; its old shard's manifest is removed first.

        Args:
            iteration: What will be written.
            expendable: Whether a sealed iteration may be overwritten.
            last_try: Whether a slot that could not be written the last time will do.

        Returns:
            Index of the slot, None if none is free or the iteration has one already.

        Raises:
            OSError: A manifest could not be removed.
        """
        if any(slot.iteration == iteration for slot in self._slots):
            return None
        order = sorted(
            range(len(self._slots)), key=lambda index: (self._slots[index].refused, self._slots[index].iteration)
        )
        for index in order:
            slot = self._slots[index]
            if slot.refused and not last_try:
                break
            if slot.busy or slot.preparing or (slot.iteration and not expendable(slot.iteration)):
                continue
            if slot.iteration and not self._evict(slot.iteration):
                continue
            self._slots[index] = _Slot(iteration, busy=True, refused=slot.refused)
            return index
        return None

    @property
    def usable(self) -> int:
        """Number of slots, without those for which there was no space the last time."""
        return sum(not slot.refused for slot in self._slots)

    def sealing(self, index: int, iteration: int) -> bool:
        """Say that a slot is about to be sealed; False if this is not the rank's to seal."""
        if not 0 <= index < len(self._slots):
            return False
        slot = self._slots[index]
        if slot.busy and slot.iteration != iteration:
            return False
        self._slots[index] = _Slot(iteration, busy=True)  # also after a restart of the agent, which forgot the lease
        return True

    def sealed(self, iteration: int) -> None:
        """Say that the slot of an iteration is sealed."""
        for slot in self._slots:
            if slot.iteration == iteration:
                slot.busy = slot.refused = False

    def free(self, iteration: int) -> None:
        """Say that the slot of an iteration holds nothing."""
        for slot in self._slots:
            if slot.iteration == iteration:
                slot.iteration, slot.busy = 0, False

    def refuse(self, iteration: int) -> None:
        """Say that a rank could not write the slot that it had for an iteration: others are taken before it."""
        for slot in self._slots:
            if slot.iteration == iteration and slot.busy:
                slot.refused = True
        self.free(iteration)

    def free_unsealed(self, sealing: Callable[[int], bool]) -> list[int]:
        """Free what was leased and will not be written any more; returns those iterations."""
        found = [slot.iteration for slot in self._slots if slot.busy and not sealing(slot.iteration)]
        for iteration in found:
            self.free(iteration)
        return found

    def discard_above(self, iteration: int) -> list[int]:
        """Remove the manifests of everything sealed above an iteration: training goes another way from there."""
        found = [slot.iteration for slot in self._slots if slot.iteration > iteration and not slot.busy]
        for newer in found:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.manifest(self._job_dir, newer, self._rank))
            self.free(newer)
        return found

    def is_free(self, index: int) -> bool:
        """Whether a slot holds nothing, and nobody is at it."""
        slot = self._slots[index]
        return not (slot.iteration or slot.busy or slot.preparing)

    def begin_preparing(self, done: Collection[int]) -> int | None:
        """Keep a slot that holds nothing for those who lay it out; None if there is none but those in ``done``."""
        index = next((one for one in range(self.count) if one not in done and self.is_free(one)), None)
        if index is not None:
            self._slots[index].preparing = True
        return index

    def prepared(self, index: int) -> None:
        """Say that a slot is laid out, or will not be."""
        self._slots[index].preparing = False

    def words(self) -> str:
        """What holds the slots, for a message."""
        return ", ".join(
            f"slot {index} {'is being sealed for' if slot.busy else 'holds'} iteration {slot.iteration}"
            for index, slot in enumerate(self._slots)
            if slot.iteration
        )

    def _evict(self, iteration: int) -> bool:
        with pins.exclude(self._job_dir, iteration) as mine:
            if mine:
                self._forget(iteration)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(paths.manifest(self._job_dir, iteration, self._rank))
            return mine
