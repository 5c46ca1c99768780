"""Copies from a device into mapped slot memory: a lane for each device, which copies beside the training's own stream.

The slot's memory is registered with CUDA once, so that the copy is DMA into the page cache; where that is refused, it
goes through a pinned buffer. Nothing of CUDA is touched before the first tensor of a CUDA device comes, and the device
as a whole is never waited for.
"""

from __future__ import annotations

import logging
import mmap
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from slurm_resil.ckpt import dtypes
from slurm_resil.core.log import event

STAGING_BYTES = 64 << 20
_cuda: Any = torch.cuda  # which is not typed
log = logging.getLogger(__name__)


class Runtime(Protocol):
    """What the copies need of a device's runtime; streams and events are as in ``torch.cuda``."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of such a device."""

    def stream(self, device: torch.device) -> Any:
        """Make a stream."""

    def event(self) -> Any:
        """Make an event."""

    def current(self, device: torch.device) -> Any:
        """Stream that this thread's work on a device goes to."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Let this thread's work go to a stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the stream that is in use; at once if ``target`` is not pinned."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Make a pinned buffer of bytes."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether host memory is known to the device."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory that is there; returns 0 or an error's number."""

    def unregister(self, address: int) -> None:
        """Undo it."""


class CudaRuntime:
    """CUDA itself."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """See Runtime."""
        return tensor.is_cuda

    def stream(self, device: torch.device) -> Any:
        """See Runtime."""
        return _cuda.Stream(device)

    def event(self) -> Any:
        """See Runtime."""
        return _cuda.Event()

    def current(self, device: torch.device) -> Any:
        """See Runtime."""
        return _cuda.current_stream(device)

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """See Runtime."""
        context: AbstractContextManager[object] = _cuda.stream(stream)
        return context

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Runtime."""
        target.copy_(source, non_blocking=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See Runtime."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See Runtime."""
        return tensor.is_pinned()

    def register(self, address: int, nbytes: int) -> int:
        """See Runtime."""
        return int(_cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        """See Runtime."""
        _cuda.cudart().cudaHostUnregister(address)


class DeviceLane:
    """Copies from one device to the host, on a stream of their own.

    Args:
        runtime: Of the device.
        device: The device.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime, self._device = runtime, device
        self._stream = runtime.stream(device)
        self._staging: torch.Tensor | None = None

    def start(self) -> None:
        """Order what follows after all work that this thread has given the device so far."""
        ready = self._runtime.event()
        ready.record(self._runtime.current(self._device))
        self._stream.wait_event(ready)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, perhaps later: ``target`` is host memory of the same type and shape."""
        with self._runtime.use(self._stream):
            if self._runtime.is_pinned(target):
                for to, from_ in _pieces(target, source):
                    self._runtime.copy(to, from_)
            else:
                self._through_staging(target, source)

    def _through_staging(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = self._runtime.pinned(STAGING_BYTES)
        for to, from_ in _pieces(target, source):
            flat = dtypes.as_bytes(to)
            bytes_ = dtypes.as_bytes(from_.contiguous().resolve_conj().resolve_neg())
            for at in range(0, bytes_.numel(), STAGING_BYTES):
                piece = bytes_[at : at + STAGING_BYTES]
                staged = self._staging[: piece.numel()]
                self._runtime.copy(staged, piece)
                self._stream.synchronize()
                flat[at : at + piece.numel()].copy_(staged)

    def fence(self) -> None:
        """Order what this thread gives the device from now on after all copies so far; nobody waits here."""
        done = self._runtime.event()
        done.record(self._stream)
        self._runtime.current(self._device).wait_event(done)

    def finish(self) -> None:
        """Return when every copy is done; then the sources may change."""
        self._stream.synchronize()


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut what is not contiguous: it is put in order on the device first, and that must not take much of its memory."""
    if source.is_contiguous() or source.nbytes <= STAGING_BYTES or source.ndim == 0:
        yield target, source
        return
    if source.shape[0] == 1:
        yield from _pieces(target[0], source[0])
        return
    rows = max(1, source.shape[0] * STAGING_BYTES // source.nbytes)
    for to, from_ in zip(torch.split(target, rows), torch.split(source, rows), strict=True):
        if from_.shape[0] == 1:
            yield from _pieces(to[0], from_[0])
        else:
            yield to, from_


class Lanes:
    """Lanes of all devices that a state is on, made when first needed. Host memory needs none.

    Args:
        runtime: Of the devices; only tests give another.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.runtime = runtime or CudaRuntime()
        self._lanes: dict[torch.device, DeviceLane] = {}
        self._started: set[torch.device] = set()

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device that has a lane."""
        return self.runtime.on_device(tensor)

    def in_batches(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`copy_all` is the way for a tensor."""
        return tensor.is_cpu and not self.runtime.on_device(tensor)

    def begin(self, device: torch.device) -> None:
        """Order copies from a device after this thread's work on it so far, once until :meth:`finish`."""
        if device not in self._lanes:
            self._lanes[device] = DeviceLane(self.runtime, device)
        if device not in self._started:
            self._lanes[device].start()
            self._started.add(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy with the lane of the source's device; what has no lane is copied at once."""
        if not self.on_device(source):
            target.copy_(source)
            return
        self.begin(source.device)
        self._lanes[source.device].copy(target, source)

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy what is in host memory already; one call, during which other threads may run."""
        if targets:
            torch._foreach_copy_(targets, sources)

    def fence(self) -> None:
        """See :meth:`DeviceLane.fence`, for all devices with copies under way."""
        for device in list(self._started):
            self._lanes[device].fence()

    def finish(self) -> None:
        """Return when all copies are done."""
        try:
            for device in self._started:
                self._lanes[device].finish()
        finally:
            self._started.clear()


class Registered:
    """Mapped memory that a device knows as pinned; each mapping is registered once, however often it is used.

    Args:
        runtime: Of the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[int, int] = {}  # address -> CUDA's answer

    def add(self, map_: mmap.mmap) -> None:
        """Register a mapping, unless it is; a refusal is logged, copies then go through staging."""
        address = _address(map_)
        if address in self._known:
            return
        code = self._known[address] = self._runtime.register(address, len(map_))
        if code:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            event(
                log,
                "host_register_refused",
                level=logging.WARNING,
                code=code,
                nbytes=len(map_),
                memlock_bytes="unlimited" if limit == resource.RLIM_INFINITY else limit,
                mend="copies go through a pinned buffer and block the training longer; raise LimitMEMLOCK of slurmd",
            )

    def remove(self, map_: mmap.mmap) -> None:
        """Take a mapping back, before it is unmapped."""
        address = _address(map_)
        if self._known.pop(address, 1) == 0:
            self._runtime.unregister(address)


def _address(map_: mmap.mmap) -> int:
    return torch.frombuffer(map_, dtype=torch.uint8, count=1).data_ptr()
