"""Verifies checkpoints at rest: the shards of this node and the drained file. Reads everything."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from slurm_resil.comm.base import Bytes
from slurm_resil.core import fsio, paths, pins
from slurm_resil.core.errors import DataError
from slurm_resil.drain.shards import READ_BYTES
from slurm_resil.format import blocks, frame, sealed, stamp
from slurm_resil.format.manifest import DrainedManifest, Item, ShardManifest, digest


def shard_flaws(job_dir: str, iteration: int, done: Callable[[int], None] = lambda _: None) -> list[str]:
    """Verify this node's shards of an iteration; says what is wrong.

    Args:
        job_dir: Job's directory in the burst buffer.
        iteration: Which.
        done: Told the bytes of each read.

    Raises:
        OSError: Something cannot be read.
    """
    flaws: list[str] = []
    with pins.hold(job_dir, iteration):
        good, bad = sealed.load(job_dir, iteration)
        flaws += bad
        for manifest in good:
            flaws += manifest_flaws(job_dir, manifest, done)
    return flaws


def manifest_flaws(job_dir: str, manifest: ShardManifest, done: Callable[[int], None] = lambda _: None) -> list[str]:
    """Verify one shard of this node; says what is wrong. The caller has pinned it.

    Raises:
        OSError: Something cannot be read.
    """
    path = os.path.join(job_dir, "slots", os.path.basename(manifest.slot))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return [f"slot {path} of rank {manifest.rank} is missing"]
    except OSError as error:
        if error.errno not in fsio.UNREADABLE:
            raise
        return [f"slot {path} of rank {manifest.rank}: {error.strerror}"]  # a link, or something that is no file
    try:
        flaws = outer_flaws(fd, path, manifest)
        return flaws + [flaw for item in manifest.items if (flaw := item_flaw(fd, path, manifest, item, done))]
    finally:
        os.close(fd)


def outer_flaws(fd: int, path: str, manifest: ShardManifest) -> list[str]:
    """Say what is wrong with a slot around its items: its stamp, and the file's structure."""

    def read(start: int, stop: int) -> Bytes:
        data = np.empty(stop - start, np.uint8)
        fsio.pread_into(fd, data.data, start, path)
        return data

    flaws, size = [], os.fstat(fd).st_size
    try:
        stamp.check(read(0, min(size, stamp.BYTES)), manifest, path)
    except DataError as error:
        flaws.append(error.message)
    try:
        frame.check(read, manifest, size, path)
    except DataError as error:
        flaws.append(error.message)
    return flaws


def item_flaw(fd: int, path: str, manifest: ShardManifest, item: Item, done: Callable[[int], None]) -> str:
    """Compare an item of a slot that is open as ``fd`` with its hash; says what is wrong, empty if nothing is."""
    state = blocks.ItemHash(item.block_bytes)
    buffer = np.empty(min(READ_BYTES, max(item.nbytes, 1)), np.uint8)
    try:
        for at in range(0, item.nbytes, buffer.size):
            view = buffer[: min(buffer.size, item.nbytes - at)].data
            fsio.pread_into(fd, view, (item.offset or 0) + at, path)
            state.update(view)
            done(len(view))
    except DataError as error:
        return f"{item.name} of rank {manifest.rank}: {error.message}"
    found = blocks.flaw(item, state.finish())
    return f"{path} of rank {manifest.rank}: {found}" if found else ""


def drained_flaws(run_dir: str, iteration: int, done: Callable[[int], None] = lambda _: None) -> list[str]:
    """Verify a drained file against its table of blocks; says what is wrong, naming what lies in the bad blocks.

    Raises:
        FileNotFoundError: There is no manifest: the checkpoint is not durable.
        OSError: The file cannot be read.
    """
    where = paths.drained_manifest(run_dir, iteration)
    try:
        manifest = DrainedManifest.load(where)
    except DataError as error:
        return [error.message]
    path = os.path.join(run_dir, os.path.basename(manifest.file))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return [f"{path} is missing, but {where} is there"]
    try:
        size = os.fstat(fd).st_size
        if size != manifest.file_bytes:
            return [f"{path} has {size} bytes, not {manifest.file_bytes}"]
        flaws = []
        buffer = np.empty(min(manifest.block_bytes, max(size, 1)), np.uint8)
        for block, expected in enumerate(manifest.blocks):
            begin = block * manifest.block_bytes
            view = buffer[: min(manifest.block_bytes, size - begin)].data
            fsio.pread_into(fd, view, begin, path)
            if digest(view) != expected:
                flaws.append(f"{path}: block {block} is damaged{inside(manifest, begin, begin + len(view))}")
            done(len(view))
        return flaws
    finally:
        os.close(fd)


def inside(manifest: DrainedManifest, begin: int, end: int) -> str:
    """Name in words what lies in a range of bytes of a drained file."""
    names = [
        item.name if item.rank is None else f"{item.name} of rank {item.rank}"
        for item in manifest.items
        if item.offset is not None and item.offset < end and item.offset + item.nbytes > begin
    ]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f" ({', '.join(names[:4])}{more})" if names else " (metadata)"
