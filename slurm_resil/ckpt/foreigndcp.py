"""Read what torch.distributed.checkpoint has written, without running anything that stands in it.

Its ``.metadata`` is a pickle. Here it makes plain records and nothing else: every name in it stands for something of
ours that only keeps what it is given, and a name that is not in the table is refused. What lies in the data files is
read with ``weights_only=True``, and the checksums of the archives, which torch itself does not look at, are compared.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from slurm_resil.core.errors import DataError
from slurm_resil.format import layout

METADATA = ".metadata"
_LARGEST_METADATA = 4 << 30  # bytes
_ENUM = "_MEM_FORMAT_ENCODING"


class Record:
    """In place of an object of torch's: what its pickle says about it, as ``fields``."""

    KIND: ClassVar[str] = ""

    fields: dict[Any, Any]

    def __new__(cls, *arguments: object) -> Record:
        """Make one as a pickle does, which may never call ``__init__``."""
        made = super().__new__(cls)
        made.fields = dict(enumerate(arguments))
        return made

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}  # of a class with slots
        self.fields.update(state if isinstance(state, dict) else enumerate(state if isinstance(state, tuple) else ()))

    def get(self, name: object, *types: type) -> Any:
        """Value of a field.

        Raises:
            TypeError: It has none, or of another type.
        """
        value = self.fields.get(name)
        if not isinstance(value, types):
            raise TypeError(f"{name} of a {self.KIND} is a {type(value).__name__}")
        return value


def _record(kind: str) -> type[Record]:
    return type(kind, (Record,), {"KIND": kind})


def _size(sizes: object = ()) -> tuple[int, ...]:
    if not isinstance(sizes, tuple | list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise pickle.UnpicklingError(f"{sizes!r} is no size of a tensor")
    return tuple(sizes)


def _joined(*parts: str) -> str:
    return os.path.join("", *parts)


def _nothing(*_: object) -> None:
    """In place of what is of no use here: a layout, a member of an enumeration."""


_RECORDS = {
    name: _record(name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_StorageInfo", "_StoragePrefix",
    )
}  # fmt: skip
_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _nothing,
    ("builtins", "getattr"): _nothing,  # of an enumeration's member, and never the real one
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    **{(f"pathlib{module}", f"{name}Path"): _joined for module in ("", "._local") for name in ("Posix", "Windows", "")},
}


class _Inert(pickle.Unpickler):
    """Looks every name up in the tables above, and nowhere else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard.")):
            if name == _ENUM:
                return _nothing
            if name in _RECORDS:
                return _RECORDS[name]
        dtype = getattr(torch, name, None) if module == "torch" and f"torch.{name}" in layout.TORCH_DTYPES else None
        found = dtype if isinstance(dtype, torch.dtype) else _NAMES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return found

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


def checked_archive(file: Any, where: str) -> None:
    """Compare the checksums of an archive that ``torch.save`` has written.

    Raises:
        DataError: They do not match, or it is none.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        # NotImplementedError: a method of compression that zipfile does not know; torch compresses nothing
        raise DataError(f"{where} is damaged or cut off: {error}", path=where, fault="truncated") from error
    if bad is not None:
        raise DataError(
            f"{where} is damaged: {bad} in it does not match its checksum",
            mend="copy it again; if it was saved with set_crc32_options(False), save it again with checksums",
            path=where,
            fault="flipped",
        )


def load_plain(file: Any, where: str, **options: Any) -> Any:
    """``torch.load`` of tensors and plain values; nothing else is made, and no code is run.

    Raises:
        DataError: It holds something else, or is damaged.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        _, found, name = str(error).partition("GLOBAL ")
        if not (found and name.split()):  # it got nowhere: another format, or one that was cut off
            raise DataError(
                f"{where} is no file of torch.save that can be read without running code", path=where
            ) from error
        raise DataError(
            f"{where} holds more than tensors and plain values ({name.split()[0]}), "
            "which could be read only by running its code",
            mend="load it where it was made, and save state_dict()s and numbers only",
            path=where,
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{where} cannot be read: {_words(error)}", path=where) from error


def _words(error: Exception) -> str:
    """First line of what an error says; its kind if it says nothing."""
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__


class Checkpoint:
    """A directory of torch.distributed.checkpoint, opened.

    Args:
        path: The directory.

    Attributes:
        tensors: Type and shape of each tensor, by its flat name.
        objects: Flat names of everything else.
        paths: Path of each flat name in the state that was saved.

    Raises:
        DataError: Its metadata cannot be read, or is not what it should be.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        where = os.path.join(path, METADATA)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.objects: list[str] = []
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        try:
            with open(where, "rb") as file:
                if os.fstat(file.fileno()).st_size > _LARGEST_METADATA:
                    raise DataError(f"{where} is larger than {_LARGEST_METADATA} bytes", path=where)
                metadata = _Inert(file).load()
            self._take(metadata)
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{path} is no checkpoint of torch.distributed: it has no {METADATA}", path=path) from error
        except OSError:
            raise
        except Exception as error:  # a pickle that is damaged raises whatever it likes
            words = _words(error)
            raise DataError(
                f"{where} cannot be read: {words}",
                mend="copy it again, or save the checkpoint again with torch 2.0 or newer",
                path=where,
            ) from error

    def _take(self, metadata: Any) -> None:
        if not isinstance(metadata, _RECORDS["Metadata"]):
            raise TypeError(f"it is a {type(metadata).__name__}")
        for name, entry in metadata.get("state_dict_metadata", dict).items():
            if isinstance(entry, _RECORDS["TensorStorageMetadata"]):
                properties = entry.get("properties", Record)
                dtype = properties.fields.get("dtype", properties.fields.get(0))
                if not isinstance(dtype, torch.dtype):
                    raise TypeError(f"{name} has no type")
                self.tensors[name] = dtype, entry.get("size", tuple)
                chunks = [(c.get("offsets", tuple), c.get("sizes", tuple)) for c in entry.get("chunks", list)]
                self._chunks[name] = chunks
            else:
                self.objects.append(name)
        for index, place in metadata.get("storage_data", dict).items():
            self._places[index.get("fqn", str), index.fields.get("offset")] = place
        planned = metadata.fields.get("planner_data")
        known: Mapping[str, Any] = planned if isinstance(planned, dict) else {}
        self.paths = {
            name: path if isinstance(path := known.get(name), tuple) and path else (name,)
            for name in (*self.tensors, *self.objects)
        }

    def object(self, name: str) -> Any:
        """Read something that is no tensor.

        Raises:
            DataError: It holds more than tensors and plain values, or is damaged.
        """
        return self._load(name, None)

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor, put together.

        Raises:
            DataError: It is damaged, or is not all there.
        """
        dtype, shape = self.tensors[name]
        chunks = self._chunks[name]
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for offsets, sizes in chunks:
            part = self._load(name, offsets)
            inside = len(offsets) == len(sizes) == len(shape)
            inside = inside and all(a + n <= end for a, n, end in zip(offsets, sizes, shape, strict=True))
            if not (inside and isinstance(part, torch.Tensor) and part.dtype == dtype and tuple(part.shape) == sizes):
                found = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
                raise DataError(
                    f"{self._path}: the part of {name} at {offsets} is {found}, and should be {dtype} {sizes}"
                    f" in {shape}",
                    path=self._path,
                )
            if sizes == shape:
                return part.detach()
            whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] = part.detach()
            covered += math.prod(sizes)
        if covered != whole.numel():
            raise DataError(f"{self._path}: the parts of {name} have {covered} of {whole.numel()} elements")
        return whole

    def _load(self, name: str, offset: tuple[int, ...] | None) -> Any:
        place = self._places.get((name, offset))
        if place is None:
            raise DataError(f"{self._path}: {METADATA} does not say where {name} is", path=self._path, fault="torn")
        file = str(place.get("relative_path", str))
        first, count = int(place.get("offset", int)), int(place.get("length", int))
        if os.path.basename(file) != file or place.fields.get("transform_descriptors"):
            how = place.fields.get("transform_descriptors")
            raise DataError(
                f"{self._path}: {name} is in {file!r}{f' changed by {how}' if how else ''}, which cannot be read here",
                mend="save it again with plain torch.distributed.checkpoint.save",
                path=self._path,
            )
        path = os.path.join(self._path, file)
        where = f"{path} ({name}, byte {first})"
        try:
            with open(path, "rb") as stream:
                stream.seek(first)
                data = stream.read(count)
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing", path=path, fault="missing") from error
        if len(data) != count:
            words = f"{path} is truncated: {name} lies from byte {first} to {first + count}"
            raise DataError(words, path=path, fault="truncated")
        checked_archive(io.BytesIO(data), where)
        return load_plain(io.BytesIO(data), where)
