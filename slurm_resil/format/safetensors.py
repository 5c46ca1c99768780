"""The header of a safetensors file: 8 bytes of length, then JSON with type, shape and place of each tensor.

Source: https://huggingface.co/docs/safetensors, format. The data follows without holes, in the order of the header. A
checkpoint in several files has an index beside them, JSON with ``weight_map``: which file each tensor is in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_resil.core import fsio
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.format import layout
from slurm_resil.format.manifest import DrainedItem

ENDING = ".safetensors"
INDEX_ENDING = ".index.json"
_ALIGNMENT = 8  # of the data
_LONGEST_HEADER = 100_000_000  # bytes, as the format's own reader has it
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES = {name: f"torch.{dtype}" for dtype, name in _NAMES.items()}
_NUMPY = {"b1": "bool", "c8": "complex64"} | {
    f"{code}{size}": f"{kind}{8 * size}"
    for code, kind, sizes in (("u", "uint", (1, 2, 4, 8)), ("i", "int", (1, 2, 4, 8)), ("f", "float", (2, 4, 8)))
    for size in sizes
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a safetensors file.

    Attributes:
        name: As the file calls it.
        dtype: As in a manifest, ``torch.<name>``.
        shape: Elements.
        file: The file.
        offset: First of its bytes in the file.
        nbytes: How many.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


def dtype_name(dtype: str) -> str | None:
    """Type as safetensors calls it, None if it has none: big-endian, text, dates and the rarer floats."""
    kind, _, name = dtype.partition(".")
    if kind == "numpy":
        name = _NUMPY.get(name.lstrip("<|"), "")
    return _NAMES.get(name) if kind in ("torch", "numpy") else None


def header(named: Sequence[tuple[str, DrainedItem]], metadata: Mapping[str, str]) -> bytes:
    """Build everything that stands in front of the data.

    Args:
        named: Tensors in the order of their data, with the names that they get, each its own.
        metadata: Texts that go along.

    Raises:
        UsageError: A type is not known there.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, item in named:
        dtype = dtype_name(item.dtype)
        if dtype is None:
            raise UsageError(
                f"{name} is of type {item.dtype}, which safetensors does not have",
                mend="leave it out with --only, or take --format torch",
            )
        entries[name] = {"dtype": dtype, "shape": list(item.shape), "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read(path: str) -> list[Tensor]:
    """Find the tensors of a file, of an index, or of a directory that has either; no data is read.

    Returns:
        In the order of the data in the files.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: It is not what the format says; names the file, what was read and what would be right.
    """
    if os.path.isdir(path):
        return _read_directory(path)
    return _read_index(path) if path.endswith(INDEX_ENDING) else _read_file(path)


def _read_directory(path: str) -> list[Tensor]:
    names = sorted(os.listdir(path))
    indexes = [name for name in names if name.endswith(ENDING + INDEX_ENDING)]
    files = [name for name in names if name.endswith(ENDING)]
    if len(indexes) == 1:
        return _read_index(os.path.join(path, indexes[0]))
    if len(files) == 1 and not indexes:
        return _read_file(os.path.join(path, files[0]))
    found = ", ".join(indexes or files) or f"no *{ENDING}"
    raise DataError(
        f"{path} does not say which tensors make the checkpoint: it has {found}",
        mend=f"name one file, or the index (*{ENDING}{INDEX_ENDING}) of several",
        path=path,
    )


def _read_index(path: str) -> list[Tensor]:
    raw = fsio.read_json(path)
    places = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise DataError(f"{path} is no index: it has no weight_map from names to files", path=path)
    found: list[Tensor] = []
    for file in sorted(set(places.values())):
        if os.path.basename(file) != file or not file:
            raise DataError(f"{path} names the file {file!r}, which does not lie beside it", path=path)
        try:
            inside = {tensor.name: tensor for tensor in _read_file(os.path.join(os.path.dirname(path), file))}
        except FileNotFoundError as error:
            raise DataError(f"{path} names {file}, which is missing", path=path, fault="missing") from error
        wanted = {name for name, place in places.items() if place == file}
        if wanted != inside.keys():
            odd = sorted(wanted ^ inside.keys())[0]
            where = f"in {path} and not in {file}" if odd in wanted else f"in {file} and not in {path}"
            raise DataError(f"the tensor {odd} is {where}", mend="the files are not of one export", path=path)
        found += inside.values()
    return found


def _read_file(path: str) -> list[Tensor]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise DataError(
                f"{path} is no safetensors file: its {size} bytes begin with a header's length of {length}",
                mend="it is another format, or was cut off while it was copied",
                path=path,
            )
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no safetensors file: its header cannot be read ({error})", path=path) from error
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
    at = 8 + length
    for tensor in tensors:
        if tensor.offset != at:
            raise DataError(
                f"{path} is no safetensors file: {tensor.name} begins at byte {tensor.offset}, {at} is right", path=path
            )
        at += tensor.nbytes
    if at != size:
        fault = "truncated" if size < at else "flipped"
        raise DataError(f"{path} has {size} bytes, its header wants {at}", path=path, fault=fault)
    return tensors


def _tensor(path: str, name: str, entry: Any, base: int) -> Tensor:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise DataError(
            f"{path}: {name} is of type {entry['dtype']}", mend=f"known are {', '.join(sorted(_DTYPES))}", path=path
        )
    if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
        raise ValueError(f"{name} has shape {shape} and lies from {start} to {stop}")
    if stop - start != math.prod(shape) * layout.itemsize(dtype):
        raise ValueError(f"{name} of type {dtype} and shape {shape} has {stop - start} bytes")
    return Tensor(name=name, dtype=dtype, shape=shape, file=path, offset=base + start, nbytes=stop - start)


def index(places: Mapping[str, str], total_bytes: int) -> dict[str, object]:
    """The index of several files, as Hugging Face's programs read it.

    Args:
        places: File of each tensor.
        total_bytes: Bytes of all tensors.
    """
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(places)}
