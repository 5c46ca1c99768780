"""``slurm-resil ckpt export``: tensors of a drained checkpoint into a file that other programs read."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import click
import numpy as np

from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.places import as_json_option, places, resolve
from slurm_resil.comm.base import from_os_error
from slurm_resil.core import fsio
from slurm_resil.core.errors import SpaceError, UsageError
from slurm_resil.drain import peek
from slurm_resil.format import safetensors
from slurm_resil.format.decode import Array
from slurm_resil.format.layout import BYTES_DTYPES
from slurm_resil.format.manifest import DrainedItem, DrainedManifest

_BY_ENDING = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def chosen(
    manifest: DrainedManifest, *, only: Sequence[str], strip: str, rank: int | None
) -> list[tuple[str, DrainedItem]]:
    """Tensors to export with the names that they get, in the order of the file.

    Raises:
        UsageError: There is none.
    """
    found = [
        (item.name.removeprefix(strip), item)
        for item in manifest.items
        if item.dtype not in BYTES_DTYPES
        and (item.rank is None or item.rank == rank)
        and (not only or any(fnmatch.fnmatchcase(item.name, pattern) for pattern in only))
    ]
    if not found:
        raise UsageError("no tensor is chosen", mend="`slurm-resil ckpt show` lists the names, as in --only 'model/*'")
    return sorted(found, key=lambda pair: (pair[1].offset or 0, pair[0]))


def _pieces(item: DrainedItem, read: peek.Read) -> Iterator[Array]:
    base = item.offset or 0
    for start in range(0, item.nbytes, peek.CHUNK_BYTES):
        try:
            piece = read(base + start, base + min(start + peek.CHUNK_BYTES, item.nbytes))
        except OSError as error:  # not to be taken for one of the file that is written
            raise from_os_error(error, f"reading {item.name}") from error
        yield piece


def _whole(item: DrainedItem, read: peek.Read) -> Array:
    pieces = list(_pieces(item, read))
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


@contextlib.contextmanager
def _published(path: str) -> Iterator[BinaryIO]:
    """A file that has its name only once it is complete.

    Raises:
        SpaceError: It cannot be written.
    """
    temp = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        with open(temp, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
        fsio.fsync_dir(os.path.dirname(path) or ".")
    except OSError as error:
        raise SpaceError(f"cannot write {path}: {error.strerror}", mend="free space there, or name another") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temp)


@click.command()
@click.argument("iteration", type=click.IntRange(min=0))
@click.argument("file", type=click.Path(dir_okay=False))
@places
@click.option("--format", "kind", type=click.Choice(("safetensors", "torch")), help="Default: by the file's ending.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Only these names, as in 'model/*'; repeatable.")
@click.option("--strip", default="", metavar="PREFIX", help="Take this off the names, as in model/")
@click.option("--rank", type=click.IntRange(min=0), help="Also what is this rank's own.")
@as_json_option
def export(
    iteration: int,
    file: str,
    run_dir: str | None,
    job_dir: str | None,
    kind: str | None,
    only: tuple[str, ...],
    strip: str,
    rank: int | None,
    as_json: bool,
) -> None:
    """Write tensors of a drained checkpoint into FILE: safetensors (without torch), or torch's own format.

    Every byte is verified on the way. Tied weights are there once, under the name of the first; plain values are not.
    """
    run_dir, _ = resolve(run_dir, job_dir)
    kind = kind or _BY_ENDING.get(os.path.splitext(file)[1])
    if kind is None:
        raise UsageError(f"{file} does not say its format", mend="say --format safetensors or --format torch")
    try:
        manifest = RunCatalog(run_dir).load(iteration)
    except FileNotFoundError as error:
        mend = "drain it first (`slurm-resil ckpt drain`), or look with `slurm-resil ckpt ls`"
        raise UsageError(f"iteration {iteration} is not drained in {run_dir}", mend=mend) from error
    named = chosen(manifest, only=only, strip=strip, rank=rank)
    with peek.drained_file(run_dir, manifest) as read, _published(file) as out:
        if kind == "torch":
            from slurm_resil.ckpt.export import save

            save(out, ((name, item.dtype, item.shape, _whole(item, read)) for name, item in named))
        else:
            about = {"format": "pt", "run_id": manifest.run_id, "iteration": str(iteration)}
            out.write(safetensors.header(named, about))
            for _, item in named:
                for piece in _pieces(item, read):
                    out.write(piece.data)
    nbytes = sum(item.nbytes for _, item in named)
    if as_json:
        click.echo(json.dumps({"file": file, "format": kind, "tensors": len(named), "bytes": nbytes}))
    else:
        click.echo(f"{len(named)} tensors, {nbytes} bytes: {file}")
