"""A stand-in for a device's runtime: streams that work late and in order, and host memory that is poisoned until then.

"Device memory" is host memory that was marked. A copy that is asked for poisons its target at once; the bytes come when
the stream gets to it, and are those that the source has then. What is not ordered rightly is therefore seen.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

POISON = 0xA5
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Event:
    def __init__(self) -> None:
        self.fired = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.put(self.fired.set)


class Stream:
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], Any]) -> None:
        self._work.put(call)

    def wait_event(self, event: Event) -> None:
        self.put(lambda: event.fired.wait(10))

    def synchronize(self) -> None:
        done = threading.Event()
        self.put(done.set)
        assert done.wait(10)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            time.sleep(self._delay_s)
            call()


class StandIn:
    """See ``slurm_resil.ckpt.device.Runtime``."""

    def __init__(self, *, late: str = "", refuses: bool = False) -> None:
        self.refuses = refuses
        self._delay_s = 0.05 if late == "lanes" else 0.003
        self.training = Stream(0.1 if late == "training" else 0.003)
        self.streams = [self.training]
        self.registered: dict[int, int] = {}
        self.registrations: list[int] = []  # CUDA's answers
        self._memory: set[int] = set()
        self._staging: list[torch.Tensor] = []
        self._used = threading.local()

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor is on the device."""
        self._memory.add(tensor.untyped_storage().data_ptr())
        return tensor

    def run(self, call: Callable[[], Any]) -> None:
        """Give the device work, as training does."""
        self.training.put(call)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    # the protocol

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self._delay_s))
        return self.streams[-1]

    def event(self) -> Event:
        return Event()

    def current(self, device: torch.device) -> Stream:
        return getattr(self._used, "stream", self.training)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._used.stream = self.current(torch.device("cpu")), stream
        try:
            yield
        finally:
            self._used.stream = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self.current(source.device)
        if target.numel():
            target.reshape(-1).view(torch.uint8).fill_(POISON)
        stream.put(lambda: target.copy_(source))
        if not self.is_pinned(target):
            stream.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._staging.append(torch.empty(nbytes, dtype=torch.uint8))
        return self._staging[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        ranges = [*self.registered.items(), *((one.data_ptr(), one.numel()) for one in self._staging)]
        return any(start <= at < start + size for start, size in ranges)

    def register(self, address: int, nbytes: int) -> int:
        code = 1 if self.refuses else ALREADY_REGISTERED if address in self.registered else 0
        self.registrations.append(code)
        if not code:
            self.registered[address] = nbytes
        return code

    def unregister(self, address: int) -> None:
        del self.registered[address]
