"""What a node holds for others and nobody needs any more: found, and removed on demand."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_resil.core import paths, pins, spare
from slurm_resil.redundancy.files import own_directory


@dataclass(frozen=True, kw_only=True)
class Waste:
    """A file that protects nothing.

    Attributes:
        name: In the directory of the redundancy.
        iteration: Of which checkpoint.
        nbytes: Space that it takes.
        why: Why nobody needs it.
    """

    name: str
    iteration: int
    nbytes: int
    why: str


def waste(job_dir: str, durable: int | None) -> list[Waste]:
    """Find what protects nothing.

    Args:
        job_dir: Job's directory in the burst buffer.
        durable: Newest iteration that is whole on the parallel file system: a restore takes nothing older. None: there
            is none, and everything that came to its end stays.

    Raises:
        DataError: The directory is not this user's own.
        OSError: It cannot be read.
    """
    directory = own_directory(job_dir)
    if directory is None:
        return []
    listed = sorted(os.listdir(directory))
    found = []
    for name in listed:
        # hidden: ".<name>.part" and ".<name>.spare" of parities, ".<name>.<pid>.<random>.tmp" of a manifest
        plain = name[1:].split(".json.")[0].split(".bin.")[0] if name.startswith(".") else os.path.splitext(name)[0]
        parsed = paths.parse_member(f"{plain}.json")
        if parsed is None:
            continue  # nothing of ours
        whole = f"{plain}.json" in listed and not name.startswith(".")
        if whole and (durable is None or parsed[0] >= durable):
            continue
        why = f"iteration {durable} is durable" if whole else "its encode never came to its end"
        why = "kept for the next encode to write over" if name.endswith(spare.ENDING) else why
        with contextlib.suppress(FileNotFoundError):
            size = os.stat(os.path.join(directory, name), follow_symlinks=False).st_blocks * 512
            found.append(Waste(name=name, iteration=parsed[0], nbytes=size, why=why))
    return found


def remove(job_dir: str, found: Sequence[Waste]) -> tuple[list[Waste], dict[str, str]]:
    """Remove it, manifests first; what a mover is at stays.

    Returns:
        What went, and why each other one stayed.

    Raises:
        OSError: The file system refused.
    """
    gone: list[Waste] = []
    left: dict[str, str] = {}
    directory = paths.redundancy(job_dir)
    for one in sorted(found, key=lambda one: not one.name.endswith(".json")):
        with pins.exclude(job_dir, one.iteration) as alone:
            if not alone:
                left[one.name] = "a mover is at it"
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, one.name))
            gone.append(one)
    return gone, left
