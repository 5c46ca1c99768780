"""What may be copied while training goes on: parameters and tensors of optimizers, which change in ``step()`` alone.

All else (buffers, what a forward pass changes, tensors that no optimizer has) is copied at once. A hook holds each
optimizer's ``step()`` back until the copies are done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slurm_resil.core.log import event

log = logging.getLogger(__name__)


class Hooks:
    """Hooks in the optimizers of a state.

    Attributes:
        pending: Returns when the tensors may change; None if nothing is being copied.
    """

    def __init__(self) -> None:
        self.pending: Callable[[], None] | None = None
        self._hooked: list[tuple[torch.optim.Optimizer, Any]] = []
        self._warned = False

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[object], bool]:
        """Hold these optimizers back from now on, and no others.

        Returns:
            Whether a tensor changes in their ``step()`` alone.
        """
        gone = [entry for entry in self._hooked if not any(entry[0] is one for one in optimizers)]
        for entry in gone:
            entry[1].remove()
            self._hooked.remove(entry)
        for optimizer in optimizers:
            if not any(optimizer is one for one, _ in self._hooked):
                self._hooked.append((optimizer, optimizer.register_step_pre_hook(self._before_step)))
        if not optimizers and not self._warned:
            self._warned = True
            mend = "put torch optimizers themselves into the state, not what wraps them"
            event(log, "nothing_is_lazy", level=logging.WARNING, why="no optimizer is in the state", mend=mend)
        ids: set[int] = set()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                ids.update(map(id, group["params"]))
            for entries in optimizer.state.values():
                if isinstance(entries, dict):
                    ids.update(map(id, entries.values()))
        return lambda origin: id(origin) in ids and isinstance(origin, torch.Tensor)

    def close(self) -> None:
        """Take the hooks out."""
        for _, handle in self._hooked:
            handle.remove()
        self._hooked.clear()

    def _before_step(self, *_: object) -> None:
        pending = self.pending
        if pending is not None:
            pending()
