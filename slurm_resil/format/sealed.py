"""Sealed shards of a node: which there are, and which of all nodes' make a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, ResilError, TryAgainError
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.format.world import words


def listed(job_dir: str) -> dict[int, list[int]]:
    """Ranks with a manifest by iteration; nothing if there is no such directory."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(os.path.join(job_dir, "manifests")):
            parsed = paths.parse_manifest(name)
            if parsed is not None:
                found.setdefault(parsed[0], []).append(parsed[1])
    return found


def load(job_dir: str, iteration: int) -> tuple[list[ShardManifest], list[str]]:
    """Read this node's manifests of an iteration.

    Returns:
        Those that are right, and what is wrong with each other one.
    """
    good, bad = [], []
    for rank in sorted(listed(job_dir).get(iteration, ())):
        path = paths.manifest(job_dir, iteration, rank)
        try:
            manifest = ShardManifest.load(path)
            if (manifest.iteration, manifest.rank) != (iteration, rank):
                raise DataError(f"{path} is of iteration {manifest.iteration}, rank {manifest.rank}")
            good.append(manifest)
        except FileNotFoundError:
            continue
        except ResilError as error:
            bad.append(error.message)
    return good, bad


@dataclass(frozen=True, kw_only=True)
class Found:
    """A manifest that some mover has; what is needed to choose."""

    mover: int
    rank: int
    run_id: str
    job_id: int
    attempt: int
    world_size: int
    created_s: float

    @classmethod
    def of(cls, manifest: ShardManifest, mover: int) -> Found:
        """Pick what is needed of a manifest."""
        names = ("rank", "run_id", "job_id", "attempt", "world_size", "created_s")
        return cls(mover=mover, **{name: getattr(manifest, name) for name in names})


def choose(found: Sequence[Found], bad: Sequence[str], iteration: int) -> dict[int, Found]:
    """Choose the shards that make the checkpoint of an iteration.

    The same iteration may have been sealed by an earlier attempt too, on nodes that have other ranks now: shards of
    different attempts are never mixed, and the newest attempt counts.

    Returns:
        What was chosen, by rank.

    Raises:
        DataError: A manifest is broken, or shards of two runs or world sizes are there.
        TryAgainError: Some ranks have not sealed; names them.
    """
    newest = max(((f.job_id, f.attempt) for f in found), default=None)
    taken = [f for f in found if (f.job_id, f.attempt) == newest]
    kinds = sorted({(f.run_id, f.world_size) for f in taken})
    if len(kinds) > 1:
        text = " and ".join(f"run {run}, world size {size}" for run, size in kinds)
        raise DataError(f"shards of different checkpoints in iteration {iteration}: {text}")
    chosen: dict[int, Found] = {}
    for one in sorted(taken, key=lambda f: (f.rank, -f.created_s, f.mover)):
        chosen.setdefault(one.rank, one)
    size = kinds[0][1] if kinds else 0
    missing = sorted(set(range(size)) - set(chosen))
    if bad:
        gone = f" (no shard of {words(missing)})" if missing else ""
        raise DataError(f"iteration {iteration}{gone}: {'; '.join(bad)}")
    if missing:
        here = f"attempt {newest[1]}" if newest else ""
        raise TryAgainError(
            f"iteration {iteration} is not sealed by {words(missing)} of {size} ({here})",
            mend="wait until all ranks have sealed, or drain an earlier iteration",
        )
    if not chosen:
        raise TryAgainError(f"iteration {iteration} is sealed by no rank", mend="look with `slurm-resil ckpt ls`")
    return chosen
