"""The copies of one save: what has to be done at once, and what may be done while training goes on.

Later copies are cut into pieces. A thread works through them; the training, when it comes to the point where the
tensors change, takes pieces itself and so waits for no more than the rest.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable

import torch

from slurm_resil.ckpt.device import Lanes
from slurm_resil.core.errors import StateError

PIECE_BYTES = 16 << 20  # copied at once: who helps waits for one piece of the other at most
# up to here torch copies with one thread; above it would wake threads that the training needs
_SERIAL_ELEMENTS = 32_768
_BATCH = 256  # small tensors in a piece
_Pair = tuple[torch.Tensor, torch.Tensor]


class Copies:
    """See the module.

    Args:
        lanes: How tensors are copied.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._now: list[_Pair] = []
        self._later: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []  # name, target, source, version
        self._pieces: deque[Callable[[], None]] = deque()
        self._device: list[_Pair] = []
        self._lock = threading.Lock()
        self._left = 0
        self._changed = ""  # tensor that was changed before it was copied
        self._error: Exception | None = None
        self._released = threading.Event()  # the tensors may change again

    @property
    def later_bytes(self) -> int:
        """Bytes that are copied later."""
        return sum(source.nbytes for _, _, source, _ in self._later)

    def tensor(self, name: str, target: torch.Tensor, source: torch.Tensor, *, later: bool) -> None:
        """Add a copy.

        Args:
            name: Item, for errors.
            target: In the slot.
            source: In the state, on any device.
            later: Whether the source stays as it is for a while.
        """
        if later and not source.is_inference():
            # a tensor of its own: the training may give the source other memory (``.data = ``, ``half()``), and what it
            # had would go away under the copy
            self._later.append((name, target, source.detach(), source._version))
        elif self._lanes.in_batches(source):
            self._now.append((target, source))
        else:
            with torch.no_grad():
                self._lanes.copy(target, source)

    def start(self) -> None:
        """Copy what has to be copied at once."""
        with torch.no_grad():
            try:
                self._lanes.copy_all(*map(list, zip(*self._now, strict=True))) if self._now else None
            except BaseException:
                self._lanes.finish()
                raise
            self._now.clear()
            if self._later:
                self._lanes.fence()  # what is queued now may change what was copied so far
                self._cut()

    def finish(self) -> None:
        """Copy what is left, unless the training is at it, and wait for all.

        Raises:
            StateError: A tensor was changed before it was copied.
        """
        try:
            with torch.no_grad():
                try:
                    if self._later:
                        self._copy_device()
                        self._work()
                        self._released.wait()
                finally:
                    self._lanes.finish()
        finally:
            self._released.set()
        if self._error is not None:
            raise self._error
        if self._changed:
            raise StateError(
                f"{self._changed} was changed while it was being copied, by something else than the step() of an "
                "optimizer in the state",
                mend="save without lazy, or let only optimizers of the state change parameters between saves",
                state_path=self._changed,
            )

    def release(self) -> None:
        """Return when the tensors may change: in the training's thread, which copies what nobody has begun.

        Work that a device is given afterwards comes after its copies.
        """
        if not self._released.is_set():
            with torch.no_grad():
                self._work()
            self._released.wait()
        if self._later:
            self._lanes.fence()

    # pieces

    def _cut(self) -> None:
        batch: list[_Pair] = []
        for _, target, source, _ in self._later:
            if not self._lanes.in_batches(source):
                self._lanes.begin(source.device)
                self._device.append((target, source))
            elif (
                source.numel() > _SERIAL_ELEMENTS
                and source.is_contiguous()
                and not (source.is_conj() or source.is_neg())
            ):
                self._pieces.extend(_moves(target, source))
            else:
                batch.append((target, source))
        for at in range(0, len(batch), _BATCH):
            targets, sources = map(list, zip(*batch[at : at + _BATCH], strict=True))
            self._pieces.append(lambda targets=targets, sources=sources: self._lanes.copy_all(targets, sources))  # type: ignore[misc] # bound now
        self._left = len(self._pieces) + bool(self._device)

    def _copy_device(self) -> None:
        if self._device:
            try:
                for target, source in self._device:
                    self._lanes.copy(target, source)
            finally:
                self._done()

    def _work(self) -> None:
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            try:
                piece()
            except Exception as error:  # noqa: BLE001 -- kept for finish()
                self._error = error
            finally:
                self._done()

    def _done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        # before anybody may change a tensor again: a change up to now was not waited for
        self._changed = next((name for name, _, source, version in self._later if source._version != version), "")
        self._released.set()


def _moves(target: torch.Tensor, source: torch.Tensor) -> list[Callable[[], None]]:
    """Copy contiguous memory in pieces, each without holding the interpreter and in one thread."""
    to, from_, size = target.data_ptr(), source.data_ptr(), source.nbytes

    def move(at: int) -> Callable[[], None]:
        count = min(PIECE_BYTES, size - at)
        return lambda: _memmove(to + at, from_ + at, count)

    return [move(at) for at in range(0, size, PIECE_BYTES)]


def _memmove(target: int, source: int, count: int) -> None:
    ctypes.memmove(target, source, count)
