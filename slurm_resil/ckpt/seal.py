"""Seal and verify shards: hash what lies in a slot and publish its manifest. Runs in the agent: no torch here.

What can be wrong with a shard has one word each, in ``error.context["fault"]``: ``missing``, ``truncated``, ``torn``
(the writer did not come to its end), ``stale`` (the slot was written again), ``swapped`` (of another rank, iteration,
attempt, job or run) and ``flipped`` (bytes do not match their hash).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import xxhash

from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.format import blocks, contents, frame
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import DrainedManifest, ShardManifest


def seal(job_dir: str, draft: ShardManifest, *, sync: bool = False) -> ShardManifest:
    """Hash a slot from the page cache and publish its manifest.

    Args:
        job_dir: Job's directory in the burst buffer.
        draft: As returned by ``Arena.write``; hashes are empty.
        sync: Also fsync slot and manifest, to survive a reboot.

    Returns:
        The manifest that was published.

    Raises:
        DataError: The slot is not what the draft says, or was written again meanwhile; nothing is published.
        OSError: The file system refused; nothing is published.
    """
    started = time.perf_counter()
    with mapped(job_dir, draft) as (data, fd):
        unsealed = [replace(i, block_bytes=size) if (size := blocks.block_size(i.nbytes)) else i for i in draft.items]
        hashes = contents.hashes(data, unsealed)
        structure = frame.digest(lambda start, stop: data[start:stop], frame.spans(draft.items), len(data))
        stamps.check(data, draft, slot_path(job_dir, draft))
        if sync:
            os.fsync(fd)
    items = tuple(replace(item, xxh3=one, blocks=each) for item, (one, each) in zip(unsealed, hashes, strict=True))
    costs = {**draft.costs_s, "seal": time.perf_counter() - started}
    manifest = replace(draft, version=ShardManifest.READS[-1], items=items, frame=structure, costs_s=costs)
    path = paths.manifest(job_dir, manifest.iteration, manifest.rank)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    try:
        manifest.publish(path, sync=sync)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)  # it may be there, and only not be on the device for sure
        raise
    return manifest


def verify(job_dir: str, manifest: ShardManifest) -> None:
    """Check that a shard is what its manifest says, down to the last byte.

    Raises:
        DataError: It is not; says what is wrong, and ``context["fault"]`` has it in one word.
    """
    with mapped(job_dir, manifest) as (data, _):
        contents.check_items(data, manifest, manifest.items, slot_path(job_dir, manifest))


def slot_path(job_dir: str, manifest: ShardManifest) -> str:
    """Path of the slot that a manifest names.

    Raises:
        DataError: The name is not that of a slot of this directory.
    """
    if manifest.slot != os.path.basename(manifest.slot) or not manifest.slot.endswith(".h5"):
        raise DataError(f"the manifest names {manifest.slot!r}, which is no slot", fault="swapped")
    return os.path.join(job_dir, "slots", manifest.slot)


@contextlib.contextmanager
def mapped(
    job_dir: str, manifest: ShardManifest, *, unmap: Callable[[Callable[[], None]], None] = lambda call: call()
) -> Iterator[tuple[mmap.mmap, int]]:
    """Map a slot and check everything but its bytes: there, long enough, complete, and of this manifest.

    The mapping is private: writing to it does not reach the file. Yields the mapping and the descriptor.

    Args:
        job_dir: Job's directory in the burst buffer.
        manifest: Of a shard in it.
        unmap: Calls what unmaps, now or later: that takes a tenth of the time of a restore.

    Raises:
        DataError: See :func:`verify`.
    """
    path = slot_path(job_dir, manifest)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", fault="missing") from error
    try:
        size = os.fstat(fd).st_size
        need = max((item.offset + item.nbytes for item in manifest.items if item.offset is not None), default=0)
        if size < max(need, stamps.BYTES):
            raise DataError(f"{path} is truncated: {size} bytes of at least {need}", fault="truncated")
        data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        try:
            stamps.check(data, manifest, path)
            yield data, fd
            if not os.path.exists(path) or os.stat(path).st_ino != os.fstat(fd).st_ino:
                raise DataError(f"{path} is stale: the slot was laid out again", fault="stale")
        finally:
            unmap(functools.partial(_close, data))
    finally:
        os.close(fd)


def _close(data: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a tensor still looks at it: unmapped when that is gone
        data.close()


def verify_drained(run_dir: str, manifest: DrainedManifest) -> None:
    """Read a whole drained file and compare every block with its hash.

    Raises:
        DataError: Missing, truncated or flipped; says what is hit.
    """
    path = os.path.join(run_dir, os.path.basename(manifest.file))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", fault="missing") from error
    with open(fd, "rb", buffering=0) as file:
        check_drained_size(path, os.fstat(fd).st_size, manifest)
        buffer = memoryview(bytearray(manifest.block_bytes))
        for index, expected in enumerate(manifest.blocks):
            start = index * manifest.block_bytes
            view = buffer[: min(manifest.block_bytes, manifest.file_bytes - start)]
            got = 0
            while got < len(view):
                done = file.readinto(view[got:])
                if not done:
                    raise DataError(f"{path} is truncated at byte {start + got}", fault="truncated")
                got += done
            if xxhash.xxh3_128_hexdigest(view) != expected:
                raise flipped_block(path, manifest, index)


def check_drained_size(path: str, size: int, manifest: DrainedManifest) -> None:
    """Compare the size of a drained file with its manifest.

    Raises:
        DataError: Another size, or the manifest's block table does not cover it.
    """
    if size != manifest.file_bytes:
        raise DataError(f"{path} is truncated: {size} bytes of {manifest.file_bytes}", fault="truncated")
    if len(manifest.blocks) != -(-size // manifest.block_bytes):
        raise DataError(f"the manifest of {path} has {len(manifest.blocks)} blocks for {size} bytes", fault="torn")


def flipped_block(path: str, manifest: DrainedManifest, index: int) -> DataError:
    """Build the error for a block that does not match, naming what lies in it."""
    start, stop = index * manifest.block_bytes, (index + 1) * manifest.block_bytes
    hit = [i.name for i in manifest.items if i.offset is not None and i.offset < stop and i.offset + i.nbytes > start]
    what = f"{hit[0]}{f' and {len(hit) - 1} more' if len(hit) > 1 else ''}" if hit else "the file's structure"
    return DataError(f"{path}: bytes {start} to {stop} ({what}) do not match their hash", fault="flipped")
