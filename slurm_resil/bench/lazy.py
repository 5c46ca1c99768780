"""What a lazy save costs the training: how long it blocks, and how much slower the iterations after it are.

An iteration is work that computes for twice as long as the plain copy takes, as a forward and a backward pass do, and
the ``step()`` of an optimizer that changes every parameter. What blocks is the save itself and the time that hooks hold
``step()`` back.
"""

from __future__ import annotations

import statistics
import time

import torch

from slurm_resil.bench import workload
from slurm_resil.bench.workload import FEW, SEALED_S, seconds
from slurm_resil.core.errors import ResilError
from slurm_resil.session import Checkpointer

ITERATIONS = 10
_TIMES = 2.0  # forward and backward, over the plain copy
_EDGE = 256  # of the matrices that are multiplied: they stay in the caches, as those of a GPU would not be here


class _Training:
    """Iterations, and how long hooks hold the optimizer back."""

    def __init__(self, size_bytes: int, dtype: torch.dtype) -> None:
        self.model = workload.model(size_bytes, FEW, dtype)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self._matrix = torch.randn(_EDGE, _EDGE) / _EDGE
        self._began = self.held_s = 0.0
        self.compute_s = 0.0
        self.optimizer.register_step_pre_hook(self._before)

    def watch(self) -> None:
        """Note when the hooks that are there now are through; call it once the Checkpointer has its own."""
        self.optimizer.register_step_pre_hook(self._after)

    def iterate(self) -> None:
        """Compute for as long as ``compute_s`` says, then change the parameters; ten times."""
        for _ in range(ITERATIONS):
            end = time.perf_counter() + self.compute_s
            while time.perf_counter() < end:
                self._matrix = torch.mm(self._matrix, self._matrix).clamp_(-1, 1)
            self.optimizer.step()

    def _before(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _after(self, *_: object) -> None:
        self.held_s += time.perf_counter() - self._began


def samples(size_bytes: int, dtype: torch.dtype, repeats: int, directory: str | None) -> dict[str, list[float]]:
    """Measure; see the module.

    Returns:
        Seconds by name: ``copy``, ``blocked`` (a lazy save), ``with`` and ``without`` (ten iterations after one, or
        after none), each ``repeats`` times.

    Raises:
        ResilError: A save failed.
    """
    found: dict[str, list[float]] = {}
    with workload.place(directory) as work, workload.cores() as training:
        train = _Training(size_bytes, dtype)
        targets = [torch.zeros_like(parameter) for parameter in train.model.parameters()]
        sources = [parameter.detach() for parameter in train.model.parameters()]
        state = {"model": train.model, "optimizer": train.optimizer}
        training(False)  # the thread that copies stays here, with the agent
        env = workload.environment(work)
        with Checkpointer.from_env(state, strict=True, lazy=True, env=env) as checkpointer:
            checkpointer.restore()
            training(True)
            checkpointer.prepare()
            for number in range(1, repeats + 3):
                copy = seconds(lambda: workload.copy(targets, sources))
                train.compute_s = _TIMES * copy
                without = seconds(train.iterate)
                train.held_s = 0.0
                blocked = seconds(lambda number=number: checkpointer.save(number))  # type: ignore[misc] # bound now
                if number == 1:
                    train.watch()
                after = seconds(train.iterate)
                if not checkpointer.wait(timeout_s=SEALED_S):
                    raise ResilError(f"a lazy save was not sealed: {checkpointer.last_error}")
                if number > 2:
                    measured = {"copy": copy, "blocked": blocked + train.held_s, "with": after, "without": without}
                    for name, value in measured.items():
                        found.setdefault(name, []).append(value)
    return found


def measure(
    size_bytes: int, dtype: torch.dtype, repeats: int, directory: str | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Ratios and figures, see :func:`samples`."""
    middle = {name: statistics.median(one) for name, one in samples(size_bytes, dtype, repeats, directory).items()}
    ratios = {
        "save.lazy_copy": middle["blocked"] / middle["copy"],
        "save.lazy_slowdown": middle["with"] / middle["without"],
    }
    return ratios, {f"lazy_{name}_s": value for name, value in middle.items()}
