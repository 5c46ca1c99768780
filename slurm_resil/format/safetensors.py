"""The header of a safetensors file: 8 bytes of length, then JSON with type, shape and place of each tensor.

Source: https://huggingface.co/docs/safetensors, format. The data follows without holes, in the order of the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from slurm_resil.core.errors import UsageError
from slurm_resil.format.manifest import DrainedItem

_ALIGNMENT = 8  # of the data
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
}
_NUMPY = {"b1": "bool", "c8": "complex64"} | {
    f"{code}{size}": f"{kind}{8 * size}"
    for code, kind, sizes in (("u", "uint", (1, 2, 4, 8)), ("i", "int", (1, 2, 4, 8)), ("f", "float", (2, 4, 8)))
    for size in sizes
}


def dtype_name(dtype: str) -> str | None:
    """Type as safetensors calls it, None if it has none: big-endian, text, dates and the rarer floats."""
    kind, _, name = dtype.partition(".")
    if kind == "numpy":
        name = _NUMPY.get(name.lstrip("<|"), "")
    return _NAMES.get(name) if kind in ("torch", "numpy") else None


def header(named: Sequence[tuple[str, DrainedItem]], metadata: Mapping[str, str]) -> bytes:
    """Build everything that stands in front of the data.

    Args:
        named: Tensors in the order of their data, with the names that they get.
        metadata: Texts that go along.

    Raises:
        UsageError: A type is not known there, or two tensors have one name.
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
        if name in entries:
            raise UsageError(f"two tensors would have the name {name}", mend="say --strip or --only otherwise")
        entries[name] = {"dtype": dtype, "shape": list(item.shape), "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
