"""The ranks of the user's process group, and what they tell each other through its store: no collective, ever.

The store is a table of keys that the group was set up with. Whoever writes a key waits for nobody, so that it works
from any thread and beside whatever the training does with the group.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from slurm_resil.core.errors import ServiceError

_PREFIX = "slurm_resil"


class Ranks:
    """This rank among all, as they are now.

    Attributes:
        rank: This one; 0 without a process group.
        world_size: How many there are; 1 without a process group.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                self._store = dist.distributed_c10d._get_default_store()

    def claim(self, key: str, value: str) -> str:
        """Say what a key means, unless another rank has said so before; returns what it means for all.

        Args:
            key: The same on all ranks, and used once.
            value: What it is to mean; not empty.

        Raises:
            ServiceError: The store does not answer.
        """
        if self._store is None:
            return value
        try:
            return bytes(self._store.compare_set(f"{_PREFIX}/{key}", "", value)).decode()
        except RuntimeError as error:
            raise _lost(error) from error

    def forget(self, key: str) -> None:
        """Remove a key that no rank will ask for again."""
        if self._store is not None and self.rank == 0:
            # some stores cannot delete, and one may be gone: what stays is a few bytes that nobody reads
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(f"{_PREFIX}/{key}")

    def tell(self, key: str, value: str, *, timeout_s: float) -> list[str]:
        """Give a word and hear those of all ranks, in their order.

        Args:
            key: The same on all ranks, and used once.
            value: This rank's word.
            timeout_s: Longest wait for the others, seconds.

        Raises:
            ServiceError: One was not heard in time, or the store does not answer.
        """
        if self._store is None:
            return [value]
        keys = [f"{_PREFIX}/{key}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.rank], f"={value}")
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return [bytes(self._store.get(one)).decode()[1:] for one in keys]
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: Exception) -> ServiceError:
    return ServiceError(
        f"not all ranks were heard through the process group's store: {error}",
        mend="call it on all ranks, and look whether one of them has ended",
    )
