"""train_gpt.py whose whole state is garbage for a while after each call that may have saved it.

What a checkpoint holds must be the state at the call, so nothing that is still to be copied may be left behind.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import train_gpt

import slurm_resil as sr


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of the state, those of a rank's shards included."""
    model, optimizer = state["model"], state["optimizer"]
    found = [*model.parameters(), *model.buffers()]
    found += [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]


class Scribbling(sr.Checkpointer):
    """A checkpointer after whose ``step`` the state is overwritten, and put back half a second later."""

    @classmethod
    def from_env(cls, state: dict[str, Any], **options: Any) -> Scribbling:
        made = super().from_env(state, **options)
        made.__class__ = cls
        made.scribbled = state
        return made

    def step(self, iteration: int) -> bool:
        stop = super().step(iteration)
        if iteration % 5 == 0 or stop:  # the job saves every 5 iterations
            with torch.no_grad():
                found = tensors(self.scribbled)
                kept = [tensor.clone() for tensor in found]
                for tensor in found:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 85)
                time.sleep(0.5)
                for tensor, good in zip(found, kept, strict=True):
                    tensor.copy_(good)
        return stop


sr.Checkpointer = Scribbling  # type: ignore[misc] -- what train_gpt.py finds under this name
train_gpt.main()
