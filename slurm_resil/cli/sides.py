"""What ``ckpt diff`` compares: a checkpoint of the run, a drained file anywhere, or safetensors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slurm_resil.catalog import RunCatalog
from slurm_resil.comm.base import Bytes
from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.drain import peek
from slurm_resil.drain.compare import Key, Piece, Tensor, whole
from slurm_resil.format import layout, safetensors, sealed
from slurm_resil.format.manifest import DrainedItem, DrainedManifest, Item, ShardManifest
from slurm_resil.format.world import words

_MEND = "name an iteration of the run, a file ckpt-*.h5, or safetensors (a file, an index or a directory)"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two checkpoints.

    Attributes:
        title: What it is, for a person.
        tensors: What is in it.
        missing: What of it is out of reach, in words; empty if nothing is.
        encoded: Whether names are encoded as ours are, see :func:`slurm_resil.format.layout.encode_part`.
    """

    title: str
    tensors: dict[Key, Tensor]
    missing: str = ""
    encoded: bool = True


def opened(text: str, run_dir: str | None, job_dir: str | None, stack: contextlib.ExitStack) -> Side:
    """Open what an argument names.

    Args:
        text: An iteration or a path.
        run_dir: Run's directory, for iterations; None if none is named.
        job_dir: Job's directory in this node's burst buffer, for those that are not drained.
        stack: Keeps files open.

    Raises:
        UsageError: It is nothing that can be compared, or is not there.
        DataError: It is damaged.
    """
    if text.isdecimal():
        if run_dir is None:
            raise UsageError(f"no run is named to which iteration {text} belongs", mend="say --run-dir")
        return _iteration(int(text), run_dir, job_dir, stack)
    if not os.path.exists(text):
        raise UsageError(f"{text} does not exist", mend=_MEND)
    name = os.path.basename(text)
    parsed = paths.parse_of_drained(name)
    if parsed is not None and parsed[1] in ("h5", "json"):
        directory = os.path.dirname(text) or "."
        try:
            manifest = RunCatalog(directory).load(parsed[0])
        except FileNotFoundError as error:
            missing = paths.drained_manifest(directory, parsed[0])
            raise UsageError(f"{text} has no manifest {missing}", mend="copy both, it has the hashes") from error
        return _drained(directory, manifest, stack)
    if os.path.isdir(text) or name.endswith((safetensors.ENDING, safetensors.INDEX_ENDING)):
        return _safetensors(text)
    raise UsageError(f"{text} is nothing that can be compared", mend=_MEND)


def _iteration(iteration: int, run_dir: str, job_dir: str | None, stack: contextlib.ExitStack) -> Side:
    try:
        return _drained(run_dir, RunCatalog(run_dir).load(iteration), stack)
    except FileNotFoundError as error:
        held, bad = sealed.load(job_dir, iteration) if job_dir else ([], [])
        if bad:
            raise DataError("; ".join(bad)) from error
        if not held or job_dir is None:
            raise UsageError(
                f"there is no checkpoint of iteration {iteration} in {' or '.join(filter(None, (run_dir, job_dir)))}",
                mend="look with `slurm-resil ckpt ls`",
            ) from error
    return _local(job_dir, held)


def _drained(run_dir: str, manifest: DrainedManifest, stack: contextlib.ExitStack) -> Side:
    read = stack.enter_context(peek.drained_file(run_dir, manifest))

    @contextlib.contextmanager
    def item_at(base: int) -> Iterator[peek.Read]:
        yield lambda start, stop: read(base + start, base + stop)

    tensors = {
        (item.rank, item.name): whole(item, functools.partial(item_at, item.offset or 0)) for item in manifest.items
    }
    return Side(title=os.path.join(run_dir, manifest.file), tensors=tensors)


def _safetensors(path: str) -> Side:
    @contextlib.contextmanager
    def data_of(tensor: safetensors.Tensor) -> Iterator[peek.Read]:
        with open(tensor.file, "rb", buffering=0) as file:

            def read(start: int, stop: int) -> Bytes:
                out = np.empty(stop - start, np.uint8)
                fsio.pread_into(file.fileno(), out.data, tensor.offset + start, tensor.file)
                return out

            yield read

    tensors: dict[Key, Tensor] = {}
    for one in safetensors.read(path):
        item = DrainedItem(name=one.name, dtype=one.dtype, shape=one.shape, offset=one.offset, nbytes=one.nbytes)
        tensors[None, one.name] = whole(item, functools.partial(data_of, one))
    return Side(title=path, tensors=tensors, encoded=False)


def _local(job_dir: str, held: list[ShardManifest]) -> Side:
    """What this node has of a checkpoint, put together as a drain would put it together."""
    missing = sorted(set(range(held[0].world_size)) - {one.rank for one in held})
    tensors: dict[Key, Tensor] = {}
    hashes: dict[str, set[str]] = {}
    for one in held:
        for item in one.items:
            hashes.setdefault(item.name, set()).add(f"{item.xxh3} {item.dtype} {item.shape}")
    for manifest in held:
        for item in manifest.items:
            opened = functools.partial(peek.local, job_dir, manifest, item)
            if item.sharing == "sharded":
                known = tensors.get((None, item.name))
                pieces = tuple(
                    Piece(start=extent.start, shape=extent.shape, inside=extent.local, item=item, opened=opened)
                    for extent in item.extents
                )
                before = known.pieces if known else ()
                shape = item.global_shape
                tensors[None, item.name] = Tensor(dtype=item.dtype, shape=shape, pieces=(*before, *pieces))
            else:
                alone = item.sharing == "private" or len(hashes[item.name]) > 1
                tensors[manifest.rank if alone else None, item.name] = whole(item, opened)
        tensors[manifest.rank, layout.VALUES] = _values(manifest)
    title = f"shards in {job_dir}"
    return Side(title=title, tensors=tensors, missing=f"{words(missing)} are on other nodes" if missing else "")


def _values(manifest: ShardManifest) -> Tensor:
    text = json.dumps(manifest.values).encode()

    @contextlib.contextmanager
    def read() -> Iterator[peek.Read]:
        data = np.frombuffer(text, np.uint8)
        yield lambda start, stop: data[start:stop]

    item = Item(name=layout.VALUES, dtype="json", shape=(len(text),), offset=0, nbytes=len(text))
    return whole(item, read)
