"""What a save costs the training, against a plain copy of the same tensors and against what torch itself has.

A real agent seals beside it. Training, which is this process, is kept on one core with one thread, the agent and other
helpers on another one where there is one; slots and the peers' files are in the same directory. Each repeat measures
everything once, in turn, so that a busy machine is unfair to nobody; medians are compared.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
import xxhash
from torch import nn

from slurm_resil.bench import lazy, workload
from slurm_resil.bench.held import Ticker, own_bytes
from slurm_resil.bench.result import BenchResult
from slurm_resil.bench.workload import FEW, MANY, SEALED_S, seconds
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.session import Checkpointer

_WARM = 4  # saves until every slot has been used once


def _hash_slot(job_dir: str, size_bytes: int) -> None:
    """Hash as many bytes as a seal does, from the page cache, as the seal does it."""
    with open(paths.slot(job_dir, 0, 0), "rb") as file:
        state, left = xxhash.xxh3_128(), size_bytes
        buffer = memoryview(bytearray(16 << 20))
        while left > 0 and (got := file.readinto(buffer)):
            state.update(buffer[: min(got, left)])
            left -= got


class _Peers:
    """What torch itself has.

    Args:
        model: The model.
        directory: Where to save.
    """

    def __init__(self, model: nn.Module, directory: str) -> None:
        self._model, self._directory = model, directory

    def _path(self, name: str) -> str:
        path = os.path.join(self._directory, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def torch_save(self) -> float:
        """Save with ``torch.save``."""
        path = os.path.join(self._directory, "torch.pt")
        return seconds(lambda: torch.save(self._model.state_dict(), path))

    def dcp(self) -> float:
        """Save with ``dcp.save``."""
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self._path("dcp")
        return seconds(lambda: save({"model": self._model.state_dict()}, checkpoint_id=path))

    def dcp_async(self) -> float:
        """Time that ``dcp.async_save`` keeps the caller."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        path = self._path("dcp-async")
        began = time.perf_counter()
        handle = async_save({"model": self._model.state_dict()}, checkpoint_id=path)
        took = time.perf_counter() - began
        if isinstance(handle, Future):
            handle.result()
        return took


def _samples(
    work: str, size_bytes: int, tensors: int, dtype: torch.dtype, repeats: int, *, peers: bool
) -> dict[str, list[float]]:
    model = workload.model(size_bytes, tensors, dtype)
    sources = [parameter.detach() for parameter in model.parameters()]
    targets = [torch.zeros_like(source) for source in sources]
    found: dict[str, list[float]] = {}
    peer = _Peers(model, work)
    env = workload.environment(work)
    with workload.cores() as training, contextlib.ExitStack() as stack:
        training(False)
        checkpointer = stack.enter_context(Checkpointer.from_env({"model": model}, strict=True, env=env))
        checkpointer.restore()
        job_dir = workload.job_dir(work)
        before = own_bytes()
        training(True)
        found["prepare"] = [seconds(checkpointer.prepare)]
        found["extra"] = []
        for number in range(1, _WARM + repeats + 1):
            samples = {"copy": seconds(lambda: workload.copy(targets, sources))}
            samples["save"] = seconds(functools.partial(checkpointer.save, number))
            samples["seal"] = seconds(functools.partial(_sealed, checkpointer))
            found["extra"].append(float(own_bytes() - before))
            samples["hash"] = seconds(lambda: _hash_slot(job_dir, size_bytes))
            if peers and number > _WARM:
                samples |= {"torch": peer.torch_save(), "dcp": peer.dcp(), "dcp_async": peer.dcp_async()}
            if number == 1:
                found["first"] = [samples["save"]]
            if number > _WARM:
                for name, value in samples.items():
                    found.setdefault(name, []).append(value)
            if peers:  # what they keep is theirs
                before = own_bytes()
        found["held"] = _held(checkpointer, training, _WARM + repeats, repeats, lambda: workload.copy(targets, sources))
    return found


def _sealed(checkpointer: Checkpointer) -> None:
    if not checkpointer.wait(timeout_s=SEALED_S):
        raise ResilError(f"a save was not sealed: {checkpointer.last_error}")


def _held(
    checkpointer: Checkpointer,
    training: Callable[[bool], None],
    saved: int,
    repeats: int,
    plain: Callable[[], None],
) -> list[float]:
    """Seconds that a save holds the interpreter, over a plain copy, of which the same thread sees something too."""
    training(False)
    found = []
    with Ticker() as ticker:
        training(True)
        for number in range(saved + 1, saved + 1 + repeats):
            held = ticker.during(functools.partial(checkpointer.save, number))
            _sealed(checkpointer)
            found.append(max(0.0, held - ticker.during(plain)))
    return found


def measure(
    *,
    size_bytes: int,
    repeats: int = 7,
    dtype: str = "float32",
    directory: str | None = None,
    peers: bool = True,
) -> BenchResult:
    """Measure.

    Args:
        size_bytes: Size of the state.
        repeats: Of everything.
        dtype: Type of the tensors, as torch calls it.
        directory: Where slots and the peers' files go; default: ``/dev/shm``.
        peers: Whether to measure torch's own ways, too.

    Raises:
        ResilError: A save failed.
    """
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    for tensors, suffix in ((FEW, ""), (MANY, "_many")):
        with workload.place(directory) as work:
            samples = _samples(work, size_bytes, tensors, getattr(torch, dtype), repeats, peers=peers and not suffix)
        middle = {name: statistics.median(values) for name, values in samples.items()}
        ratios[f"save.eager_copy{suffix}"] = middle["save"] / middle["copy"]
        ratios[f"save.seal_hash{suffix}"] = middle["seal"] / middle["hash"]
        for name in ("torch", "dcp", "dcp_async"):
            if name in middle:
                ratios[f"save.peer_{name}"] = middle["save"] / middle[name]
        ratios[f"save.first_later{suffix}"] = middle["first"] / middle["save"]
        figures[f"gil_ms_per_100{suffix}"] = middle.pop("held") * 1000 / (tensors / 100)
        figures[f"extra_bytes{suffix}"] = max(samples.pop("extra"))
        del middle["extra"]
        figures |= {f"{name}{suffix}_s": value for name, value in middle.items()}
    lazy_ratios, lazy_figures = lazy.measure(size_bytes, getattr(torch, dtype), repeats, directory)
    ratios, figures = ratios | lazy_ratios, figures | lazy_figures
    return BenchResult(bench="save", size_bytes=size_bytes, repeats=repeats, ratios=ratios, figures=figures)
