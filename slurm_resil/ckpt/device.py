"""Copies from a device into mapped slot memory: a lane for each device, which copies beside the training's own stream.

The slot's memory is registered with CUDA once, so that the copy is DMA into the page cache; where that is refused, it
goes through a pinned buffer. Nothing of CUDA is touched before the first tensor of a CUDA device comes.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import torch

from slurm_resil.core.log import event

STAGING_BYTES = 64 << 20
_cuda: Any = torch.cuda  # which is not typed
log = logging.getLogger(__name__)


class Lane(Protocol):
    """Copies from one device to the host."""

    def start(self) -> None:
        """Order what follows after all work that the training has queued so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, perhaps later: ``target`` is host memory of the same type and shape."""

    def finish(self) -> None:
        """Return when every copy is done; then the sources may change."""


class HostLane:
    """Tensors that are in host memory already: copied at once."""

    def start(self) -> None:
        """See Lane."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Lane."""
        target.copy_(source)

    def finish(self) -> None:
        """See Lane."""


class CudaLane:
    """A CUDA device: asynchronous copies on a stream of their own.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device)
        self._staging: torch.Tensor | None = None

    def start(self) -> None:
        """See Lane."""
        ready = _cuda.Event()
        ready.record(_cuda.current_stream(self._device))
        self._stream.wait_event(ready)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Lane."""
        with _cuda.stream(self._stream):
            if target.is_pinned():
                target.copy_(source, non_blocking=True)
            else:
                self._through_staging(target, source)

    def _through_staging(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        flat_source = source.contiguous().resolve_conj().reshape(-1).view(torch.uint8)
        flat_target = target.reshape(-1).view(torch.uint8)
        for at in range(0, flat_source.numel(), STAGING_BYTES):
            piece = flat_source[at : at + STAGING_BYTES]
            staged = self._staging[: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            self._stream.synchronize()
            flat_target[at : at + piece.numel()].copy_(staged)

    def finish(self) -> None:
        """See Lane."""
        self._stream.synchronize()


def make_lane(device: torch.device) -> Lane:
    """Make the lane of a device; devices other than CUDA copy through torch's own blocking copy."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


class Lanes:
    """Lanes of all devices that a state is on, made when first needed.

    Args:
        make: Makes the lane of a device.
    """

    def __init__(self, make: Callable[[torch.device], Lane] = make_lane) -> None:
        self._make = make
        self._lanes: dict[torch.device, Lane] = {}
        self._started: set[torch.device] = set()
        self.batches = make is make_lane  # whether host memory needs no lane

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy with the lane of the source's device."""
        device = source.device
        if device not in self._lanes:
            self._lanes[device] = self._make(device)
        if device not in self._started:
            self._lanes[device].start()
            self._started.add(device)
        self._lanes[device].copy(target, source)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy what is in host memory already; one call, during which other threads may run."""
        if targets:
            torch._foreach_copy_(targets, sources)

    def finish(self) -> None:
        """Return when all copies are done."""
        try:
            for device in self._started:
                self._lanes[device].finish()
        finally:
            self._started.clear()


class Registered:
    """Mapped memory that CUDA knows as pinned; each mapping is registered once, however often it is used."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # address -> CUDA's answer

    def add(self, map_: mmap.mmap) -> None:
        """Register a mapping with CUDA, unless it is; a refusal is logged, copies then go through staging."""
        address = _address(map_)
        if address in self._known:
            return
        code = int(_cuda.cudart().cudaHostRegister(address, len(map_), 0))
        self._known[address] = code
        if code:
            event(log, "host_register_refused", level=logging.WARNING, code=code, nbytes=len(map_))

    def remove(self, map_: mmap.mmap) -> None:
        """Take a mapping back from CUDA, before it is unmapped."""
        address = _address(map_)
        if self._known.pop(address, 1) == 0:
            _cuda.cudart().cudaHostUnregister(address)


def _address(map_: mmap.mmap) -> int:
    return torch.frombuffer(map_, dtype=torch.uint8, count=1).data_ptr()
