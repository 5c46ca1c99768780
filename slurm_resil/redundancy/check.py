"""Verifies at rest what a node holds to protect others, and its own shards against what was protected of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slurm_resil.core import pins
from slurm_resil.core.errors import DataError
from slurm_resil.format.manifest import BLOCK_BYTES
from slurm_resil.redundancy import member
from slurm_resil.redundancy.member import MemberManifest, ParityReader
from slurm_resil.redundancy.package import PackageReader
from slurm_resil.redundancy.survey import package_flaw, parity_flaw


def outer_flaw(job_dir: str, manifest: MemberManifest) -> str:
    """Say what is wrong with a node's parities without reading them; empty if nothing is."""
    try:
        with ParityReader(job_dir, manifest):
            return ""
    except DataError as error:
        return "" if _gone(job_dir, manifest) else error.message


def flaws(
    job_dir: str, iteration: int, *, packages: bool = False, done: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Read what a node holds of the redundancy of an iteration, and compare every hash; says what is wrong.

    Args:
        job_dir: Job's directory in the burst buffer.
        iteration: Which.
        packages: Also whether the node's own shards are, byte by byte, those that were protected: what the other nodes
            hold fits no others.
        done: Told the bytes that were read.

    Raises:
        OSError: Something cannot be read.
    """
    said: list[str] = []
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    with pins.hold(job_dir, iteration):
        for number, one in _found(job_dir):
            if number != iteration:
                continue
            if isinstance(one, str):
                said.append(one)
                continue
            try:
                with ParityReader(job_dir, one) as reader:
                    said += filter(None, [parity_flaw(reader, buffer)])
                    done(one.file_bytes)
            except DataError as error:
                said.append(error.message)
            if packages:
                said += filter(None, [_package_flaw(job_dir, one, buffer)])
                done(one.members[one.index].nbytes)
    return said


def _found(job_dir: str) -> list[tuple[int, MemberManifest | str]]:
    try:
        return list(member.found(job_dir))
    except DataError:
        return []  # said by whoever lists


def _package_flaw(job_dir: str, manifest: MemberManifest, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
    package = manifest.members[manifest.index]
    try:
        with PackageReader(job_dir, manifest.iteration, package) as reader:
            return package_flaw(reader, manifest.geometry, buffer)
    except DataError as error:
        # shards that are not here are lost or were given up: that is no damage
        return "" if error.context.get("fault") == "missing" else error.message


def _gone(job_dir: str, manifest: MemberManifest) -> bool:
    """Whether the encode was removed meanwhile: its manifest goes first."""
    return not any(isinstance(one, MemberManifest) and one.token == manifest.token for _, one in _found(job_dir))
