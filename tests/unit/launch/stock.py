"""Drained checkpoints of a run, as far as the catalog looks at them: manifests, and files of the right size."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_resil.catalog import RunCatalog
from slurm_resil.core import paths
from slurm_resil.format.manifest import DrainedManifest


def drained(run: Path, *iterations: int, size: int = 100, run_id: str = "r", **metrics: float) -> None:
    run.mkdir(exist_ok=True)
    for iteration in iterations:
        file = paths.drained(str(run), iteration)
        Path(file).write_bytes(bytes(size))
        DrainedManifest(
            run_id=run_id,
            job_id=1,
            attempt=0,
            iteration=iteration,
            world_size=2,
            file=os.path.basename(file),
            file_bytes=size,
            block_bytes=4096,
            blocks=("x",),
            items=(),
            created_s=1000.0 + iteration,
            metrics=metrics,
        ).publish(paths.drained_manifest(str(run), iteration), sync=False)


def left(run: Path) -> list[int]:
    return sorted(RunCatalog(str(run), run_id="r").durable())
