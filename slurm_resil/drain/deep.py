"""Verifies files beyond their hashes: HDF5's view of them against manifests, and drained files against the shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from slurm_resil.core import paths, pins
from slurm_resil.core.errors import DataError
from slurm_resil.drain import peek
from slurm_resil.drain.skeleton import dataset
from slurm_resil.format import blocks, layout, sealed
from slurm_resil.format.container import Found, read_index
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Item


def structure_flaws(run_dir: str, manifest: DrainedManifest) -> list[str]:
    """Open every dataset as HDF5 has it, and compare type, shape and place with the manifest; says what is wrong."""
    path = os.path.join(run_dir, os.path.basename(manifest.file))
    try:
        about, found = read_index(path)
    except FileNotFoundError:
        return [f"{path} is missing"]
    except DataError as error:
        return [error.message]
    flaws = [
        f"{path}: its attribute {name} is {about.get(name)!r}, the manifest says {getattr(manifest, name)!r}"
        for name in ("run_id", "iteration", "world_size")
        if str(about.get(name)) != str(getattr(manifest, name))
    ]
    wanted = {f"/{dataset(item.name, item.rank)}": item for item in manifest.items}
    return flaws + _datasets(path, found, wanted) + _overlaps(path, manifest)


def slot_flaws(job_dir: str, iteration: int) -> list[str]:
    """Compare this node's slots of an iteration, as HDF5 has them, with their manifests; says what is wrong."""
    flaws: list[str] = []
    with pins.hold(job_dir, iteration):
        for manifest in sealed.load(job_dir, iteration)[0]:
            path = os.path.join(job_dir, "slots", os.path.basename(manifest.slot))
            try:
                _, found = read_index(path)
            except FileNotFoundError:
                flaws.append(f"{path} is missing")
            except DataError as error:
                flaws.append(error.message)
            else:
                wanted = {layout.dataset_path(item.name): item for item in manifest.items}
                flaws += _datasets(path, found, wanted)
    return flaws


def _datasets(path: str, found: Sequence[Found], wanted: Mapping[str, Item | DrainedItem]) -> list[str]:
    there = {entry.path: entry for entry in found}
    flaws = [f"{path}: the dataset {name} is not in the manifest" for name in sorted(there.keys() - wanted.keys())]
    for name, item in sorted(wanted.items()):
        entry = there.get(name)
        if entry is None:
            flaws.append(f"{path}: the dataset {name} of the manifest is missing")
            continue
        for what in ("dtype", "shape", "offset", "nbytes"):
            here, right = getattr(entry, what), getattr(item, what)
            if here != right:
                flaws.append(f"{path}: {what} of {name} is {here}, the manifest says {right}")
        if item.nbytes != layout.nbytes(item.dtype, item.shape):
            flaws.append(f"{path}: {name} of {item.dtype} and shape {item.shape} has {item.nbytes} bytes")
    return flaws


def _overlaps(path: str, manifest: DrainedManifest) -> list[str]:
    flaws, end, before = [], 0, ""
    for item in sorted((one for one in manifest.items if one.offset is not None), key=lambda one: one.offset or 0):
        name = dataset(item.name, item.rank)
        if (item.offset or 0) < end:
            flaws.append(f"{path}: {name} begins at byte {item.offset}, inside of {before}")
        end, before = (item.offset or 0) + item.nbytes, name
        if end > manifest.file_bytes:
            flaws.append(f"{path}: {name} ends at byte {end}, the file has {manifest.file_bytes}")
    return flaws


def item_flaws(run_dir: str, manifest: DrainedManifest, job_dir: str, done: Callable[[int], None]) -> list[str]:
    """Compare what was drained with the seals of the shards that are on this node still; says what is wrong.

    Sharded items are parts of tensors, and their hashes say nothing about the whole: they are left to the blocks.
    """
    flaws: list[str] = []
    drained = {(item.rank, item.name): item for item in manifest.items}
    held = [
        one
        for one in sealed.load(job_dir, manifest.iteration)[0]
        if (one.run_id, one.job_id, one.attempt) == (manifest.run_id, manifest.job_id, manifest.attempt)
    ]
    seen: set[tuple[int | None, str]] = set()
    try:
        with peek.drained_file(run_dir, manifest) as read:
            for shard in held:
                for item in shard.items:
                    key = (shard.rank, item.name) if (shard.rank, item.name) in drained else (None, item.name)
                    target = drained.get(key)
                    if item.sharing == "sharded" or key in seen:
                        continue
                    seen.add(key)
                    where = f"{paths.drained(run_dir, manifest.iteration)}: {dataset(item.name, key[0])}"
                    if target is None:
                        flaws.append(f"{where} is missing, {shard.where} has it")
                    elif (found := _hash(target, item.block_bytes, read, done)) != item.xxh3:
                        flaws.append(f"{where} has the hash {found}, {shard.where} sealed {item.xxh3}")
    except DataError as error:
        flaws.append(error.message)
    return flaws


def _hash(item: DrainedItem, block_bytes: int, read: peek.Read, done: Callable[[int], None]) -> str:
    state, base = blocks.ItemHash(block_bytes), item.offset or 0
    for start in range(0, item.nbytes, peek.CHUNK_BYTES):
        stop = min(start + peek.CHUNK_BYTES, item.nbytes)
        state.update(read(base + start, base + stop).data)
        done(stop - start)
    return state.finish()[0]
