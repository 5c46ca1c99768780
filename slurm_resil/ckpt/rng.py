"""The global random generators of a process as one object that can be saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RngState:
    """Generators of ``random``, ``numpy.random``, torch and, where there is CUDA, of every device of this process.

    Put one into the state: ``state = {..., "rng": RngState()}``. It holds nothing by itself.
    """

    def state_dict(self) -> dict[str, Any]:
        """Take the states of all generators."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put all generators back.

        Raises:
            ValueError: The state has more CUDA devices than are here.
        """
        cuda = state.get("cuda", [])
        if cuda and (not torch.cuda.is_available() or len(cuda) > torch.cuda.device_count()):
            raise ValueError(f"the state has the generators of {len(cuda)} CUDA devices, more than are here")
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        for index, one in enumerate(cuda):
            torch.cuda.set_rng_state(one.cpu(), index)
