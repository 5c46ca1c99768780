"""The empty drained file: one contiguous dataset for each target, whose place in the file is known at once."""

from __future__ import annotations

from slurm_resil.drain.plan import Plan
from slurm_resil.format.container import Spec, create_skeleton

_ALIGN_FROM_BYTES, _ALIGN_BYTES = 1 << 20, 4096  # small tensors are packed: aligning them makes a file of holes


def dataset(name: str, rank: int | None) -> str:
    """Name in the file of a global tensor, or of what one rank owns."""
    return f"state/{name}" if rank is None else f"ranks/{rank}/{name}"


def skeleton(path: str, plan: Plan) -> list[int | None]:
    """Make the file; nothing is written to the data.

    Returns:
        Offset of the data of each target, bytes; None for empty ones.

    Raises:
        FileExistsError: There is a file already.
        SpaceError: The file system refused.
        UsageError: Two targets have one name, or a dtype is unknown.
    """
    specs = [
        Spec(path="/" + dataset(entry.name, entry.rank), dtype=entry.dtype, shape=entry.shape) for entry in plan.targets
    ]
    head = plan.head
    made = create_skeleton(
        path,
        specs,
        attributes={"run_id": head.run_id, "iteration": head.iteration, "world_size": head.world_size},
        alignment_bytes=_ALIGN_BYTES,
        alignment_from_bytes=_ALIGN_FROM_BYTES,
        mode=0o666,
    )
    return list(made.offsets)
