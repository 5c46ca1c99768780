"""Names of torch and numpy types, as manifests write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slurm_resil.core.errors import StateError
from slurm_resil.format import layout

_TORCH = {
    name: dtype
    for name in layout.TORCH_DTYPES
    if isinstance(dtype := getattr(torch, name.removeprefix("torch."), None), torch.dtype)
}
_PACKED = "torch.float4_e2m1fn_x2"  # an element is two numbers
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def torch_name(dtype: torch.dtype, where: str) -> str:
    """Name of a torch type.

    Raises:
        StateError: It cannot be stored (quantised and sub-byte types).
    """
    if dtype not in _NAMES:
        raise StateError(f"{where}: tensors of {dtype} cannot be stored", mend="convert it before saving")
    return _NAMES[dtype]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes.

    What is written there is the tensor's value only if it is neither conjugated nor negated by a flag.
    """
    # reshape(-1) keeps the stride of a dimension of size 1, whatever it is, and view() then refuses
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def torch_dtype(name: str, where: str) -> torch.dtype:
    """Type of a name.

    Raises:
        StateError: This torch does not have it.
    """
    if name not in _TORCH:
        raise StateError(f"{where}: this torch ({torch.__version__}) has no {name}", mend="use a newer torch")
    return _TORCH[name]


def numpy_name(dtype: np.dtype[np.generic], where: str) -> str:
    """Name of a numpy type; structured ones are opaque bytes, their fields are kept beside the values.

    Raises:
        StateError: It holds Python objects.
    """
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind not in "biufcmMSUV":
        raise StateError(f"{where}: numpy arrays of {dtype} cannot be stored", mend="convert it before saving")
    return f"numpy.{dtype.str}" if dtype.names is None else f"numpy.|V{dtype.itemsize}"


def numpy_dtype(name: str, fields: object = None) -> np.dtype[np.generic]:
    """Type of a name and, for structured ones, of its fields (as :func:`fields_of` gives them)."""
    if fields is None:
        return np.dtype(name.removeprefix("numpy."))
    return np.dtype([_field(entry) for entry in fields]) if isinstance(fields, list) else np.dtype(str(fields))


def name_of(value: torch.Tensor | np.ndarray[Any, Any], where: str) -> str:
    """Name of the type of a tensor or an array.

    Raises:
        StateError: It cannot be stored.
    """
    if isinstance(value, torch.Tensor):
        return torch_name(value.dtype, where)
    return numpy_name(value.dtype, where)


def can_cast(stored: str, wanted: str) -> bool:
    """Whether one type may be converted into another: floating point into such, complex numbers into such."""
    if _PACKED in (stored, wanted):
        return False
    if stored in _TORCH and wanted in _TORCH:
        one, other = _TORCH[stored], _TORCH[wanted]
        alike = one.is_complex == other.is_complex and one.is_floating_point == other.is_floating_point
        return alike and (one.is_complex or one.is_floating_point)
    if stored.startswith("numpy.") and wanted.startswith("numpy."):
        kinds = {numpy_dtype(stored).kind, numpy_dtype(wanted).kind}
        return kinds in ({"f"}, {"c"})
    return False


def fields_of(dtype: np.dtype[np.generic]) -> object:
    """Fields of a structured type as JSON; None for others."""
    return None if dtype.names is None else [_listed(entry) for entry in dtype.descr]


def _listed(entry: tuple[object, ...]) -> list[object]:
    name, kind, *shape = entry
    kind = [_listed(inner) for inner in kind] if isinstance(kind, list) else kind
    return [list(name) if isinstance(name, tuple) else name, kind, *(list(s) for s in shape if isinstance(s, tuple))]


def _field(entry: list[object]) -> tuple[object, ...]:
    name, kind, *shape = entry
    kind = [_field(inner) for inner in kind] if isinstance(kind, list) else kind
    return (tuple(name) if isinstance(name, list) else name, kind, *(tuple(s) for s in shape if isinstance(s, list)))
