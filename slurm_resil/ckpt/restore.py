"""Restore a state from a sealed shard of this node, or by any number of ranks from all shards or a drained file."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resil.ckpt import private as privacy
from slurm_resil.ckpt.load import load_into
from slurm_resil.ckpt.options import LoadOptions, LoadReport
from slurm_resil.ckpt.planning import EXACT
from slurm_resil.ckpt.private import Policy
from slurm_resil.ckpt.shards import ShardsSource
from slurm_resil.ckpt.source import DrainedSource, LocalSource
from slurm_resil.core import garbage
from slurm_resil.core.background import Background
from slurm_resil.core.errors import DataError
from slurm_resil.format.manifest import DrainedManifest, ShardManifest
from slurm_resil.format.staged import StagedCopy

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a restore did.

    Attributes:
        wanted_bytes: Bytes that went into the state.
        read_bytes: Bytes that were read for it; more than wanted where blocks hold more than this rank needs.
        staged_bytes: How many of them came from a staged copy in the burst buffer.
        seconds: How long it took.
        report: What was left as it was, or converted.
    """

    iteration: int
    wanted_bytes: int
    read_bytes: int
    staged_bytes: int = 0
    seconds: float
    report: LoadReport


def restore_local(
    state: Mapping[str, object],
    job_dir: str,
    manifest: ShardManifest,
    options: LoadOptions = EXACT,
    helpers: Sequence[Background] = (),
) -> Restored:
    """Restore from the rank's own sealed shard.

    Args:
        state: Restored in place, see :func:`slurm_resil.ckpt.load.load_into`.
        job_dir: Job's directory in the burst buffer.
        manifest: Manifest of the shard.
        options: What may differ.
        helpers: Threads that verify beside the caller.

    Raises:
        StateError: The state does not fit; nothing was changed.
        DataError: The shard is not what its manifest says; nothing was changed.
    """
    started = time.perf_counter()
    with garbage.kept(), LocalSource(job_dir, manifest, helpers) as source:
        report = load_into(state, manifest.values, source, options)
        source.check_again()
        read = source.read_bytes
    return _restored(manifest, started, read, read, report)


def restore_drained(
    state: Mapping[str, object],
    run_dir: str,
    manifest: DrainedManifest,
    rank: int,
    world_size: int,
    *,
    private: Policy = "error",
    options: LoadOptions = EXACT,
    staged: StagedCopy | None = None,
) -> Restored:
    """Restore from a drained file; the number of ranks may be another than that of the save.

    Not collective: each rank reads what it needs, in verified blocks.

    Args:
        state: Restored in place, see :func:`slurm_resil.ckpt.load.load_into`.
        run_dir: Run's directory on the parallel file system.
        manifest: Manifest of the drained file.
        rank: This rank.
        world_size: Number of ranks now.
        private: What becomes of rank-private state if the number of ranks has changed, see
            :func:`slurm_resil.ckpt.private.merge`.
        options: What may differ.
        staged: Copy of blocks of it on this node; it is closed. What is not there, or damaged, is read from the file.

    Raises:
        StateError: The state does not fit, or private state has no place to go; nothing was changed.
        DataError: The file is not what its manifest says; nothing was changed.
    """
    started = time.perf_counter()
    old = manifest.world_size
    with garbage.kept(), DrainedSource(run_dir, manifest, rank % old, staged) as source:
        values = _merged(lambda one: _values(source, one), source.is_global, old, rank, world_size, private)
        report = load_into(state, values, source, options)
        wanted, read, there = source.wanted_bytes, source.read_bytes, source.staged_bytes
    return _restored(manifest, started, wanted, read, report, staged=there)


def restore_shards(
    state: Mapping[str, object],
    job_dir: str,
    manifests: Sequence[ShardManifest],
    rank: int,
    world_size: int,
    *,
    private: Policy = "error",
    options: LoadOptions = EXACT,
) -> Restored:
    """Restore from the sealed shards of all ranks that saved, which are all on this node; their number may be another.

    Not collective: each rank reads what it needs, in verified blocks.

    Args:
        state: Restored in place, see :func:`slurm_resil.ckpt.load.load_into`.
        job_dir: Job's directory in the burst buffer.
        manifests: Of all shards of the iteration.
        rank: This rank.
        world_size: Number of ranks now.
        private: As for :func:`restore_drained`.
        options: What may differ.

    Raises:
        StateError: The state does not fit, or private state has no place to go; nothing was changed.
        DataError: The shards do not make one checkpoint, or are not what their manifests say; nothing was changed.
    """
    started = time.perf_counter()
    old = len(manifests)
    with garbage.kept(), ShardsSource(job_dir, manifests, rank % max(old, 1)) as source:
        values = _merged(source.values, source.is_global, old, rank, world_size, private)
        report = load_into(state, values, source, options)
        source.check_again()
        for flaw in source.flaws:
            log.error("slurm-resil: rank %d: %s; another shard holds the same, and that was taken", rank, flaw)
        wanted, read = source.wanted_bytes, source.read_bytes
    return _restored(manifests[0], started, wanted, read, report)


def _restored(
    manifest: ShardManifest | DrainedManifest,
    started: float,
    wanted: int,
    read: int,
    report: LoadReport,
    *,
    staged: int = 0,
) -> Restored:
    if report:
        log.warning("slurm-resil: iteration %d was not restored as it stands: %s", manifest.iteration, report)
    return Restored(
        iteration=manifest.iteration,
        wanted_bytes=wanted,
        read_bytes=read,
        staged_bytes=staged,
        seconds=time.perf_counter() - started,
        report=report,
    )


def _merged(
    values: Callable[[int], Any],
    is_global: Callable[[str], bool],
    old: int,
    rank: int,
    world_size: int,
    private: Policy,
) -> Any:
    """Values that a rank restores, of the ``old`` ranks that saved."""
    if world_size == old:
        return values(rank)
    return privacy.merge([values(one) for one in range(old)], is_global, policy=private, rank=rank)


def _values(source: DrainedSource, rank: int) -> Any:
    try:
        return json.loads(source.values(rank))
    except ValueError as error:
        raise DataError(f"the values of rank {rank} are not JSON: {error}", fault="torn") from error
