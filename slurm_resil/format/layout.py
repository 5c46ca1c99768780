"""Names and sizes of what is stored; pure functions, no torch, no h5py.

An item's name is a path: parts joined by ``/``. A part is a key of the state, encoded so that every key has a name and
no two keys have the same one. Text stays readable: ``state["model"]["blocks.0.weight"]`` is ``model/blocks.0.weight``.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Sequence

from slurm_resil.core.errors import UsageError
from slurm_resil.format.manifest import digest

STATE_GROUP = "/state"
RANKS_GROUP = "/ranks"
VALUES = "values"  # dataset with a rank's plain values, below /ranks/<rank>/
ALIGNMENT_BYTES = 64  # of every dataset in a slot: the largest element is 32 bytes, a cache line is 64
LONGEST_PART = 1024  # characters of an encoded part; longer ones end in a hash

# size of one element, bytes; the names are the manifest's
_TORCH_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # two numbers
}
TORCH_DTYPES = tuple(f"torch.{name}" for name in _TORCH_SIZES)
# name -> (bytes, sign, exponent position, exponent bits, mantissa position, mantissa bits, exponent bias)
CUSTOM_FLOATS = {
    "torch.bfloat16": (2, 15, 7, 8, 0, 7, 127),
    "torch.float8_e4m3fn": (1, 7, 3, 4, 0, 3, 7),
    "torch.float8_e5m2": (1, 7, 2, 5, 0, 2, 15),
    "torch.float8_e4m3fnuz": (1, 7, 3, 4, 0, 3, 8),
    "torch.float8_e5m2fnuz": (1, 7, 2, 5, 0, 2, 16),
}
BYTES_DTYPES = ("json", "bytes")  # one element is one byte


def itemsize(dtype: str) -> int:
    """Size of one element of a manifest's dtype, bytes.

    Args:
        dtype: ``torch.<name>``, ``numpy.<array protocol string>`` (``numpy.<i8``), ``json`` or ``bytes``.

    Raises:
        UsageError: The type is not one that can be stored.
    """
    kind, _, name = dtype.partition(".")
    if kind == "torch" and name in _TORCH_SIZES:
        return _TORCH_SIZES[name]
    if dtype in BYTES_DTYPES:
        return 1
    if kind == "numpy":
        digits = name.partition("[")[0].lstrip("<>|=").lstrip("biufcmMSUV")
        if digits.isdigit():
            return int(digits) * (4 if "U" in name else 1)
    raise UsageError(f"unknown dtype {dtype!r}", dtype=dtype)


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a contiguous array, bytes."""
    return itemsize(dtype) * math.prod(shape)


def encode_part(key: object) -> str:
    """Encode one key of the state as one part of a name.

    Text is kept, but for ``/``, ``%``, ``~``, control characters, lone surrogates and the parts ``.`` and ``..``, which
    are percent-encoded. Keys of other types start with ``~``, so that ``3`` and ``"3"`` are told apart. A part that
    would be longer than ``LONGEST_PART`` is cut and ends in ``~~`` and a hash of the whole.
    """
    if isinstance(key, str):
        if len(key) <= LONGEST_PART and key not in ("", ".", "..") and not _ODD.search(key):
            return key
        part = "".join(_quote(char) if _is_odd(char) else char for char in key)
        if part in ("", ".", ".."):
            part = part.replace(".", "%2E") or "%"
    else:
        text = "".join(_quote(char) if _is_odd(char) else char for char in repr(key))
        part = f"~{text}"
    if len(part) > LONGEST_PART:
        part = f"{part[: LONGEST_PART - 40]}~~{digest(part.encode())}"
    return part


def join(*keys: object) -> str:
    """Name of the item at a path of keys."""
    return "/".join(encode_part(key) for key in keys)


_ODD = re.compile("[/%~\x00-\x1f\x7f\ud800-\udfff]")


def _is_odd(char: str) -> bool:
    return _ODD.search(char) is not None


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names of items as other programs know them: the keys as they were in the state, joined by ``/``.

    Keys that are no text, and those that were too long, stay encoded, and so do names that would be the same then.
    """
    plain = {name: "/".join(map(_decode_part, name.split("/"))) for name in names}
    while taken := {text for text, count in Counter(plain.values()).items() if count > 1}:
        plain = {name: name if text in taken else text for name, text in plain.items()}
    return plain


def _decode_part(part: str) -> str:
    if part.startswith("~") or "~~" in part or "%" not in part:
        return part
    if part == "%":
        return ""
    try:
        return urllib.parse.unquote(part, encoding="utf-8", errors="strict")
    except UnicodeDecodeError:  # a lone surrogate, which no file has
        return part


def _quote(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def dataset_path(name: str, rank: int | None = None) -> str:
    """Path inside the HDF5 file: below ``/state/``, or below ``/ranks/<rank>/`` for what belongs to one rank."""
    return f"{STATE_GROUP}/{name}" if rank is None else f"{RANKS_GROUP}/{rank}/{name}"
