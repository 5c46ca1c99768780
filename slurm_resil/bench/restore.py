"""How long a restore takes, against reading and copying the same bytes and against what torch itself has.

``restore`` is all of ``Checkpointer.restore()`` of a process that has its agent: the state is looked through, the agent
says what to load, the manifest is read, every byte is verified, then all are copied, and the other ranks are waited
for, of which there are none. ``load`` is its larger part, without the agent: manifest, verification, copies.

``read`` and ``copy`` together are the limit: the slot's file is read into memory that is there, and copied from there
into the tensors. ``pieces`` does so a megabyte at a time, which stays in the processor's cache; a restore cannot, as
nothing may be changed before everything is verified. ``peer_torch_hashed`` is against torch's way and hashing the
bytes once, as torch verifies nothing.

``fetch`` and reading what it has staged is compared with as many nodes that read the drained file each by itself, see
:mod:`slurm_resil.bench.fetch`.

Training, which is this process, is kept on one core with one thread, the agent on another one where there is one. Slot,
drained file and the peers' files are in the same directory and in the page cache. Each repeat measures everything
once, in turn, so that a busy machine is unfair to nobody; medians are compared.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from slurm_resil.bench import fetch, workload
from slurm_resil.bench.result import BenchResult
from slurm_resil.bench.workload import FEW, MANY, SEALED_S, seconds
from slurm_resil.ckpt.restore import restore_drained, restore_local
from slurm_resil.comm import local
from slurm_resil.comm.base import Communicator
from slurm_resil.core import paths
from slurm_resil.core.errors import ResilError
from slurm_resil.drain import collective
from slurm_resil.drain.skeleton import skeleton
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Item, ShardManifest
from slurm_resil.session import Checkpointer

ITERATION = 1
NODES = 4
_PIECE_BYTES = 1 << 20


class _Plain:
    """The plain way: read a file into memory that is there, and copy from it into the tensors.

    Args:
        path: File.
        items: What lies where in it.
        model: Whose parameters to fill; each is one of the items.
    """

    def __init__(self, path: str, items: Mapping[str, Item | DrainedItem], model: nn.Module) -> None:
        self._path = path
        self._buffer = memoryview(bytearray(os.path.getsize(path)))
        self._places: list[tuple[int, torch.Tensor]] = []
        self._views: list[torch.Tensor] = []
        for name, parameter in model.named_parameters():
            item = items[f"model/{name}"]
            assert item.offset is not None
            target = parameter.detach()
            view = torch.frombuffer(self._buffer, dtype=target.dtype, count=target.numel(), offset=item.offset)
            self._places.append((item.offset, target))
            self._views.append(view)

    def read(self) -> None:
        """Read the whole file."""
        with open(self._path, "rb", buffering=0) as file:
            at = 0
            while got := file.readinto(self._buffer[at:]):
                at += got

    def hash(self) -> None:
        """Hash what was read, as one."""
        xxhash.xxh3_128_digest(self._buffer)

    def copy(self) -> None:
        """Copy what was read."""
        torch._foreach_copy_([target for _, target in self._places], self._views)

    def pieces(self) -> None:
        """Read and copy piece by piece."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        piece = torch.frombuffer(buffer, dtype=torch.uint8)
        with open(self._path, "rb", buffering=0) as file:
            for offset, target in self._places:
                flat = target.view(torch.uint8)
                for at in range(0, len(flat), _PIECE_BYTES):
                    count = min(_PIECE_BYTES, len(flat) - at)
                    os.preadv(file.fileno(), [buffer[:count]], offset + at)
                    flat[at : at + count].copy_(piece[:count])


class _Peers:
    """What torch itself has.

    Args:
        model: The model.
        directory: Where its files are.
    """

    def __init__(self, model: nn.Module, directory: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        self._model = model
        self._torch, self._dcp = os.path.join(directory, "torch.pt"), os.path.join(directory, "dcp")
        torch.save(model.state_dict(), self._torch)
        save({"model": model.state_dict()}, checkpoint_id=self._dcp)

    def torch(self) -> None:
        """Load with ``torch.load(mmap=True)`` and ``load_state_dict``."""
        self._model.load_state_dict(torch.load(self._torch, mmap=True, weights_only=True))

    def dcp(self) -> None:
        """Load with ``dcp.load``, in place."""
        from torch.distributed.checkpoint.state_dict_loader import load

        load({"model": self._model.state_dict()}, checkpoint_id=self._dcp)


class _Check:
    """Sees to it that what is measured does its work.

    Args:
        model: The model, as it was saved.
    """

    def __init__(self, model: nn.Module) -> None:
        *_, self._last = model.parameters()
        self._expected = self._last.detach().clone()

    @contextlib.contextmanager
    def restored(self, what: str) -> Iterator[None]:
        """Damage the model's last parameter before, compare it after."""
        with torch.no_grad():
            self._last.zero_()
        yield
        if not torch.equal(self._last.detach(), self._expected):
            raise ResilError(f"{what} did not restore the model")


def _drain(job_dir: str, run_dir: str) -> None:
    os.makedirs(run_dir, exist_ok=True)

    def one(comm: Communicator) -> Any:
        return collective.drain(comm, run_dir=run_dir, job_dir=job_dir, iteration=ITERATION, skeleton=skeleton)

    local.run(1, one)


def _save(env: Mapping[str, str], state: Mapping[str, object]) -> None:
    with Checkpointer.from_env(state, strict=True, env=env) as checkpointer:
        checkpointer.restore()
        checkpointer.save(ITERATION)
        if not checkpointer.wait(timeout_s=SEALED_S):
            raise ResilError(f"a save was not sealed: {checkpointer.last_error}")


def _samples(
    work: str, size_bytes: int, tensors: int, dtype: torch.dtype, repeats: int, *, with_peers: bool
) -> dict[str, list[float]]:
    model = workload.model(size_bytes, tensors, dtype)
    state = {"model": model}
    env = workload.environment(work)
    run_dir = os.path.join(env["SLURM_RESIL_PREFIX"], env["SLURM_RESIL_RUN_ID"])
    check, found = _Check(model), dict[str, list[float]]()

    def measured(name: str, call: Callable[[], object], *, restores: bool = True) -> None:
        with check.restored(name) if restores else contextlib.nullcontext():
            found.setdefault(name, []).append(seconds(call))

    with workload.cores() as training:
        training(False)
        _save(env, state)
        job_dir = workload.job_dir(work)
        shard, whole = paths.manifest(job_dir, ITERATION, 0), paths.drained_manifest(run_dir, ITERATION)
        peers = _Peers(model, work) if with_peers else None
        manifest = ShardManifest.load(shard)
        slot = _Plain(os.path.join(job_dir, "slots", manifest.slot), {i.name: i for i in manifest.items}, model)
        _drain(job_dir, run_dir)
        drained = DrainedManifest.load(whole)
        file = _Plain(os.path.join(run_dir, drained.file), {i.name: i for i in drained.items}, model)
        del manifest, drained
        for _ in range(repeats):
            training(False)  # that is where the agent stays
            with Checkpointer.from_env(state, strict=True, env=env) as checkpointer:
                training(True)
                measured("restore", checkpointer.restore)
            measured("read", slot.read, restores=False)
            measured("hash", slot.hash, restores=False)
            measured("copy", slot.copy)
            measured("pieces", slot.pieces)
            measured("load", lambda: restore_local(state, job_dir, ShardManifest.load(shard)))
            if peers is not None:
                measured("torch", peers.torch)
                measured("dcp", peers.dcp)
            measured("drained_read", file.read, restores=False)
            measured("drained_copy", file.copy)
            measured("drained", lambda: restore_drained(state, run_dir, DrainedManifest.load(whole), 0, 1))
    return found


def measure(
    *,
    size_bytes: int,
    repeats: int = 7,
    dtype: str = "float32",
    directory: str | None = None,
    peers: bool = True,
    nodes: int | None = None,
    pfs_bytes_s: float | None = None,
) -> BenchResult:
    """Measure.

    Args:
        size_bytes: Size of the state.
        repeats: Of everything.
        dtype: Type of the tensors, as torch calls it.
        directory: Where slot, drained file and the peers' files go; default: ``/dev/shm``.
        peers: Whether to measure torch's own ways, too.
        nodes: Movers of a fetch, all on this host; 0: no fetch is measured; None: 4, or 0 where there is no MPI.
        pfs_bytes_s: What storage gives to all of them together at most; None: what it gives.

    Raises:
        ConfigError: A fetch is to be measured, and there is no mpiexec.
        ResilError: A save, a restore or a fetch failed.
    """
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    if nodes is None:
        nodes = NODES if fetch.possible() else 0
    for tensors, suffix in ((FEW, ""), (MANY, "_many")):
        with workload.place(directory) as work:
            samples = _samples(work, size_bytes, tensors, getattr(torch, dtype), repeats, with_peers=peers)
        middle = {name: statistics.median(values) for name, values in samples.items()}
        limit = middle["read"] + middle["copy"]
        ratios |= {
            f"restore.limit{suffix}": middle["restore"] / limit,
            f"restore.load_limit{suffix}": middle["load"] / limit,
            f"restore.load_pieces{suffix}": middle["load"] / middle["pieces"],
            f"restore.drained_limit{suffix}": middle["drained"] / (middle["drained_read"] + middle["drained_copy"]),
        }
        if peers:
            ratios |= {f"restore.peer_{name}{suffix}": middle["restore"] / middle[name] for name in ("torch", "dcp")}
            ratios[f"restore.peer_torch_hashed{suffix}"] = middle["restore"] / (middle["torch"] + middle["hash"])
        figures |= {f"{name}{suffix}_s": value for name, value in middle.items()}
    if nodes:
        found = fetch.measure(
            size_bytes=size_bytes, nodes=nodes, repeats=repeats, pfs=directory, rate_bytes_s=pfs_bytes_s
        )
        ratios["restore.fetch"] = (found["fetch"] + found["fetched_read"]) / found["alone"]
        figures |= {f"{name}_s": value for name, value in found.items()} | {"fetch_nodes": nodes}
    return BenchResult(bench="restore", size_bytes=size_bytes, repeats=repeats, ratios=ratios, figures=figures)
