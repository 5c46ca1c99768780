"""The HDF5 container: files whose datasets have fixed byte offsets, so that anyone can write and read them raw.

This is the only module that imports h5py. A skeleton is created and closed before any data is written: a writer that is
killed later leaves a file that opens. Datasets are contiguous, allocated at once and never filled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5p, h5s, h5t

from slurm_resil.core.errors import DataError, SpaceError, UsageError
from slurm_resil.format import layout

USER_BLOCK_BYTES = 4096  # of a slot: room for the stamps, in front of the HDF5 superblock

_NATIVE = {
    "b1": h5t.STD_U8LE,
    "u1": h5t.STD_U8LE,
    "u2": h5t.STD_U16LE,
    "u4": h5t.STD_U32LE,
    "u8": h5t.STD_U64LE,
    "i1": h5t.STD_I8LE,
    "i2": h5t.STD_I16LE,
    "i4": h5t.STD_I32LE,
    "i8": h5t.STD_I64LE,
    "f2": h5t.IEEE_F16LE,
    "f4": h5t.IEEE_F32LE,
    "f8": h5t.IEEE_F64LE,
}
_TORCH_CODES = {
    "bool": "b1",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex32": "c4",
    "complex64": "c8",
    "complex128": "c16",
    "float8_e8m0fnu": "u1",
    "float4_e2m1fn_x2": "u1",
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One dataset to create.

    Attributes:
        path: Absolute path in the file, see :func:`slurm_resil.format.layout.dataset_path`.
        dtype: As in the manifest: ``torch.<name>``, ``numpy.<array protocol string>``, ``json`` or ``bytes``.
        shape: Elements; ``()`` is a scalar, a zero makes it empty.
        attributes: Stored on the dataset, each as a JSON string.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A file that was created.

    Attributes:
        offsets: First byte of each dataset in the file, in the order of the specs; None for an empty one.
        file_bytes: Size of the file.
    """

    offsets: tuple[int | None, ...]
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """One dataset of an existing file, see :func:`read_index`; offset None for an empty one."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    nbytes: int
    attributes: Mapping[str, Any]


def create_skeleton(
    path: str,
    specs: Sequence[Spec],
    *,
    attributes: Mapping[str, Any] | None = None,
    user_block_bytes: int = 0,
    alignment_bytes: int = layout.ALIGNMENT_BYTES,
    alignment_from_bytes: int = 1,
    mode: int = 0o600,
) -> Skeleton:
    """Create an HDF5 file with all datasets in place and no data, and close it.

    Args:
        path: The file; it must not exist yet.
        specs: Datasets.
        attributes: Attributes of the root group, each stored as a JSON string.
        user_block_bytes: Bytes in front of the HDF5 superblock, 0 or a power of two from 512.
        alignment_bytes: Objects of at least ``alignment_from_bytes`` start at a multiple of it.
        alignment_from_bytes: See ``alignment_bytes``; large for large alignments, or small tensors waste space.
        mode: Permission bits of the file, before the umask.

    Returns:
        Where each dataset's bytes belong. Whoever writes them does so with plain or MPI writes at these offsets.

    Raises:
        FileExistsError: The file is there.
        SpaceError: Storage is full or read-only.
        UsageError: A dtype is unknown, or one path is taken twice or lies below another dataset.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
    access.set_alignment(alignment_from_bytes, alignment_bytes)
    create = h5p.create(h5p.FILE_CREATE)
    create.set_userblock(user_block_bytes)
    # exclusive, without following a link; HDF5 then truncates our own empty file
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
    try:
        file = h5f.create(os.fsencode(path), h5f.ACC_TRUNC, fcpl=create, fapl=access)
        try:
            for key, value in (attributes or {}).items():
                _set_attribute(file, key, value)
            offsets = tuple(_create_dataset(file, spec) for spec in specs)
        finally:
            file.close()
    except (OSError, RuntimeError) as error:
        os.unlink(path)
        raise SpaceError(f"cannot create {path}: {error}", mend="free space there, or use another directory") from error
    except ValueError as error:
        os.unlink(path)
        raise UsageError(f"cannot lay out {path}: {error}") from error
    except BaseException:
        os.unlink(path)
        raise
    return Skeleton(offsets=offsets, file_bytes=os.path.getsize(path))


def _create_dataset(file: Any, spec: Spec) -> int | None:
    dcpl = h5p.create(h5p.DATASET_CREATE)
    dcpl.set_layout(h5d.CONTIGUOUS)
    dcpl.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    dcpl.set_fill_time(h5d.FILL_TIME_NEVER)
    lcpl = h5p.create(h5p.LINK_CREATE)
    lcpl.set_create_intermediate_group(True)
    lcpl.set_char_encoding(h5t.CSET_UTF8)
    size = layout.nbytes(spec.dtype, spec.shape)
    space = h5s.create_simple(spec.shape) if spec.shape else h5s.create(h5s.SCALAR)
    dataset = h5d.create(file, spec.path.encode(), _file_type(spec.dtype), space, dcpl=dcpl, lcpl=lcpl)
    _set_attribute(dataset, "dtype", spec.dtype)
    for key, value in spec.attributes.items():
        _set_attribute(dataset, key, value)
    if size == 0:
        return None
    offset = dataset.get_offset()
    if offset is None or dataset.get_storage_size() != size:
        raise AssertionError(f"{spec.path}: {size} bytes were not laid out as such")
    return int(offset)


def _file_type(dtype: str) -> Any:
    """HDF5 type of a manifest's dtype."""
    size = layout.itemsize(dtype)
    if dtype in layout.BYTES_DTYPES:
        return h5t.STD_U8LE
    if dtype in layout.CUSTOM_FLOATS:
        nbytes, sign, epos, ebits, mpos, mbits, bias = layout.CUSTOM_FLOATS[dtype]
        float_ = h5t.IEEE_F16LE.copy()
        float_.set_fields(sign, epos, ebits, mpos, mbits)
        float_.set_size(nbytes)
        float_.set_precision(8 * nbytes)
        float_.set_ebias(bias)
        return float_
    kind, _, name = dtype.partition(".")
    if kind == "torch":
        code = _TORCH_CODES.get(name) or f"{'u' if name.startswith('u') else 'i'}{size}"
        big = False
    else:
        code, big = name.lstrip("<>|="), name.startswith(">")
    if code in _NATIVE:
        native = _NATIVE[code].copy()
        if big:
            native.set_order(h5t.ORDER_BE)
        return native
    if code in ("c4", "c8", "c16"):
        part = _NATIVE[f"f{size // 2}"].copy()
        if big:
            part.set_order(h5t.ORDER_BE)
        pair = h5t.create(h5t.COMPOUND, size)
        pair.insert(b"r", 0, part)
        pair.insert(b"i", size // 2, part)
        return pair
    opaque = h5t.create(h5t.OPAQUE, size)
    opaque.set_tag(dtype.encode())
    return opaque


def _set_attribute(where: Any, key: str, value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    # variable length would allocate a heap; a fixed-length string stays in the object header
    type_ = h5t.C_S1.copy()
    data = text.encode()
    type_.set_size(max(1, len(data)))
    type_.set_cset(h5t.CSET_UTF8)
    type_.set_strpad(h5t.STR_NULLPAD)
    attribute = h5a.create(where, key.encode(), type_, h5s.create(h5s.SCALAR))
    attribute.write(np.array(data, dtype=f"S{max(1, len(data))}"), mtype=type_)


def read_index(path: str) -> tuple[dict[str, Any], list[Found]]:
    """Read what a file holds, without its data.

    Returns:
        The root's attributes, and every dataset in order of path.

    Raises:
        FileNotFoundError: There is none.
        DataError: It is not a readable HDF5 file.
    """
    os.stat(path)
    try:
        with h5py.File(path, "r", locking=False) as file:
            found: list[Found] = []

            def visit(_name: str, node: Any) -> None:
                if isinstance(node, h5py.Dataset):
                    nbytes = node.id.get_storage_size()
                    attributes = _attributes(node)
                    dtype = str(attributes.pop("dtype", ""))
                    offset = int(node.id.get_offset()) if nbytes else None
                    found.append(
                        Found(
                            path=node.name,
                            dtype=dtype,
                            shape=node.shape,
                            offset=offset,
                            nbytes=nbytes,
                            attributes=attributes,
                        )
                    )

            file.visititems(visit)
            return _attributes(file), sorted(found, key=lambda entry: entry.path)
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{path} is not a readable HDF5 file: {error}", path=path) from error


def _attributes(node: Any) -> dict[str, Any]:
    """Attributes as values: JSON text is parsed, other text and numbers stay what they are."""

    def parsed(value: Any) -> Any:
        text = value.decode() if isinstance(value, bytes) else str(value)
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {key: parsed(value) for key, value in node.attrs.items()}
