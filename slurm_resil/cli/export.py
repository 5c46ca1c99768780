"""``slurm-resil ckpt export``: tensors of a drained checkpoint into files that other programs read."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import click
import numpy as np

from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.places import as_json_option, examples, places, resolve
from slurm_resil.comm.base import from_os_error
from slurm_resil.core import fsio, units
from slurm_resil.core.errors import SpaceError, UsageError
from slurm_resil.drain import peek
from slurm_resil.format import safetensors
from slurm_resil.format.decode import Array
from slurm_resil.format.layout import BYTES_DTYPES, VALUES, itemsize, plain_names
from slurm_resil.format.layout import nbytes as nbytes_of
from slurm_resil.format.manifest import DrainedItem, DrainedManifest

_BY_ENDING = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}$")

Named = tuple[str, DrainedItem]


def chosen(manifest: DrainedManifest, *, only: Sequence[str], strip: str, rank: int | None) -> list[Named]:
    """Tensors to export with the names that they get, in the order of the file: keys as they were in the state.

    Raises:
        UsageError: There is none, or two would have one name.
    """
    items = [item for item in manifest.items if item.rank is None or item.rank == rank]
    plain = plain_names(item.name for item in items)
    found = [
        (plain[item.name].removeprefix(strip), item)
        for item in items
        if item.dtype not in BYTES_DTYPES
        and (not only or any(fnmatch.fnmatchcase(n, one) for n in (item.name, plain[item.name]) for one in only))
    ]
    if not found:
        raise UsageError("no tensor is chosen", mend="`slurm-resil ckpt show` lists the names, as in --only 'model/*'")
    names: set[str] = set()
    for name, _ in found:
        if name in names:
            raise UsageError(f"two tensors would have the name {name}", mend="say --strip or --only otherwise")
        names.add(name)
    return sorted(found, key=lambda pair: (pair[1].offset or 0, pair[0]))


def divided(named: Sequence[Named], most_bytes: int | None) -> list[list[Named]]:
    """Divide tensors, in their order, over files of a limited size; one that is larger has a file of its own."""
    files: list[list[Named]] = [[]]
    size = 0
    for one in named:
        if most_bytes is not None and files[-1] and size + one[1].nbytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one[1].nbytes
    return files


def file_names(file: str, count: int) -> list[str]:
    """Names of the files, as Hugging Face's programs expect them: ``model-00001-of-00003.safetensors``."""
    stem, ending = os.path.splitext(file)
    return [file] if count == 1 else [f"{stem}-{number:05}-of-{count:05}{ending}" for number in range(1, count + 1)]


def full_shapes(manifest: DrainedManifest, read: peek.Read, rank: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that are stored without what an ``expand()`` has repeated, by name; from the values of a rank.

    Args:
        manifest: Of the drained file.
        read: Reads it.
        rank: Whose; None: the first that has values.
    """
    of = [one for one in manifest.items if one.name == VALUES and one.rank is not None and rank in (None, one.rank)]
    found: dict[str, tuple[int, ...]] = {}
    waiting: list[Any] = [json.loads(_whole(of[0], read).tobytes())] if of else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("$") == "tensor" and isinstance(node.get("expanded"), list):
                found[str(node.get("item"))] = tuple(node["expanded"])
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return found


@dataclass(frozen=True, kw_only=True)
class Expanded(DrainedItem):
    """A tensor as it was in the state, of which the file has each element once.

    Attributes:
        stored: As it is in the file.
    """

    stored: DrainedItem

    @classmethod
    def of(cls, item: DrainedItem, shape: tuple[int, ...] | None) -> DrainedItem:
        """The item itself where nothing was left out."""
        if shape is None or shape == item.shape or item.nbytes == 0:
            return item
        return cls(**{**vars(item), "shape": shape, "nbytes": nbytes_of(item.dtype, shape), "stored": item})

    def read(self, read: peek.Read) -> Array:
        """All its bytes."""
        elements = _whole(self.stored, read).view(f"V{itemsize(self.dtype)}").reshape(self.stored.shape)
        return np.ascontiguousarray(np.broadcast_to(elements, self.shape)).reshape(-1).view(np.uint8)


def _pieces(item: DrainedItem, read: peek.Read) -> Iterator[Array]:
    if isinstance(item, Expanded):
        yield item.read(read)
        return
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


class Files:
    """Files that get their names once all of them are complete. Use as a context manager.

    Raises:
        SpaceError: They cannot be written.
    """

    def __init__(self) -> None:
        self._written: list[tuple[str, str]] = []  # temporary name, final name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            for temp, _ in self._written:
                with contextlib.suppress(OSError):
                    os.unlink(temp)

    @contextlib.contextmanager
    def add(self, path: str) -> Iterator[BinaryIO]:
        """Open one to be written; what it replaces is there until all are complete."""
        temp = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
        try:
            with open(temp, "xb") as file:
                self._written.append((temp, path))
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _refused(path, error) from error

    def _publish(self) -> None:
        for temp, path in self._written:
            try:
                os.replace(temp, path)
            except OSError as error:
                raise _refused(path, error) from error
        for directory in {os.path.dirname(path) or "." for _, path in self._written}:
            fsio.fsync_dir(directory)


def _refused(path: str, error: OSError) -> SpaceError:
    return SpaceError(f"cannot write {path}: {error.strerror}", mend="free space there, or name another")


def _others(file: str, names: Sequence[str]) -> list[str]:
    """Files of an earlier export of this name into another number of files: programs would read them instead."""
    directory, (stem, ending) = os.path.dirname(file) or ".", os.path.splitext(os.path.basename(file))
    new = {os.path.basename(name) for name in names}
    if len(names) > 1:
        new.add(f"{stem}{ending}{safetensors.INDEX_ENDING}")
    found = []
    for name in _listed(directory):
        inner, end = os.path.splitext(name)
        one = end == ending and _OF_SEVERAL.sub("", inner) == stem
        if (one or name == f"{stem}{ending}{safetensors.INDEX_ENDING}") and name not in new:
            found.append(os.path.join(os.path.dirname(file), name))
    return sorted(found)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # whoever writes there will say so
        return []


def _bytes(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = units.size_bytes(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}; {error.mend}") from error
    if size < 1:
        raise click.BadParameter(f"{text!r} is no size of a file, as in 5GB or 4GiB")
    return size


@click.command(epilog=examples("slurm-resil ckpt export 5000 hf/model.safetensors --only 'model/*' --strip model/"))
@click.argument("iteration", type=click.IntRange(min=0))
@click.argument("file", type=click.Path(dir_okay=False))
@places
@click.option("--format", "kind", type=click.Choice(("safetensors", "torch")), help="Default: by the file's ending.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Only these names, as in 'model/*'; repeatable.")
@click.option("--strip", default="", metavar="PREFIX", help="Take this off the names, as in model/")
@click.option("--rank", type=click.IntRange(min=0), help="Also what is this rank's own.")
@click.option(
    "--max-shard-size",
    "most_bytes",
    metavar="SIZE",
    callback=_bytes,
    help="Divide over files of at most this size, as in 5GB, with an index beside them (FILE.index.json).",
)
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
    most_bytes: int | None,
    as_json: bool,
) -> None:
    """Write tensors of a drained checkpoint into FILE: safetensors (without torch), or torch's own format.

    Every byte is verified on the way. Tied weights are there once, under the name of the first; plain values are not.
    Files of torch's format are made in memory, one after the other: --max-shard-size bounds it.
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
    with peek.drained_file(run_dir, manifest) as read:
        shapes = full_shapes(manifest, read, rank)
    named = [(name, Expanded.of(item, shapes.get(item.name))) for name, item in named]
    parts = divided(named, most_bytes)
    names = file_names(file, len(parts))
    if others := _others(file, names):
        raise UsageError(
            f"{', '.join(others[:4])} of an earlier export would be read in place of this one",
            mend="remove it, or name another file",
        )
    nbytes = sum(item.nbytes for _, item in named)
    with peek.drained_file(run_dir, manifest) as read, Files() as files:
        for name, part in zip(names, parts, strict=True):
            with files.add(name) as out:
                _write(out, kind, part, read, {"format": "pt", "run_id": manifest.run_id, "iteration": str(iteration)})
        if len(parts) > 1:
            where = {key: os.path.basename(name) for name, part in zip(names, parts, strict=True) for key, _ in part}
            with files.add(file + safetensors.INDEX_ENDING) as out:
                out.write(json.dumps(safetensors.index(where, nbytes), indent=2, sort_keys=True).encode() + b"\n")
            names.append(file + safetensors.INDEX_ENDING)
    if as_json:
        row = {"file": file, "files": names, "format": kind, "tensors": len(named), "bytes": nbytes}
        click.echo(json.dumps(row))
    else:
        click.echo(f"{len(named)} tensors, {nbytes} bytes: {names[-1]}")


def _write(out: BinaryIO, kind: str, named: Sequence[Named], read: peek.Read, about: dict[str, str]) -> None:
    if kind == "torch":
        from slurm_resil.ckpt.export import save

        save(out, ((name, item.dtype, item.shape, _whole(item, read)) for name, item in named))
        return
    out.write(safetensors.header(named, about))
    for _, item in named:
        for piece in _pieces(item, read):
            out.write(piece.data)
