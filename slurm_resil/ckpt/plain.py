"""Plain values as JSON, exactly: types, order, every bit of a number. Nothing is ever imported to read them back.

JSON's null, booleans, strings, lists, finite floats and integers of 63 bits stand for themselves. Everything else is an
object with the kind in ``"$"``, see ``FORMAT.md``.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import math
import pathlib
import struct
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from slurm_resil.core.errors import StateError

Path = tuple[object, ...]
Child = Callable[[object, Path], Any]  # encodes or decodes what is inside

DEEPEST = 200  # levels; JSON parsers give up somewhere beyond
_NARROW = 1 << 63
_DICTS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.defaultdict: "defaultdict",
    collections.Counter: "Counter",
}
DICT_KINDS = {kind: type_ for type_, kind in _DICTS.items()}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "torch.Size"}
_SEQUENCE_KINDS = {kind: type_ for type_, kind in _SEQUENCES.items()}
_FACTORIES = {f.__name__: f for f in (list, dict, set, int, float, str, bool, tuple)}
_PATHS = {f.__name__: f for f in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def where(path: Path) -> str:
    """Path in the state, for a person."""
    return "/".join(map(str, path)) or "the state"


def encode(value: object, path: Path, child: Child) -> Any:
    """Encode a plain value or container.

    Args:
        value: What to encode.
        path: Where it is in the state.
        child: Called for what a container holds.

    Raises:
        StateError: It is nothing that can be stored; names the path.
    """
    type_ = type(value)
    if value is None or type_ in (bool, str):
        return value
    if isinstance(value, enum.Enum):
        return {"$": "enum", "class": class_name(type_), "name": _enum_name(value, path)}
    if type_ is int and isinstance(value, int):
        return value if -_NARROW <= value < _NARROW else {"$": "int", "hex": hex(value)}
    if type_ is float and isinstance(value, float):
        return value if math.isfinite(value) else {"$": "float", "hex": struct.pack(">d", value).hex()}
    if type_ is complex and isinstance(value, complex):
        return {"$": "complex", "hex": struct.pack(">dd", value.real, value.imag).hex()}
    if type_ in (bytes, bytearray) and isinstance(value, bytes | bytearray):
        return {"$": type_.__name__, "base64": base64.b64encode(value).decode()}
    if type_ is list and isinstance(value, list):
        return _children(value, path, child)
    if isinstance(value, set | frozenset) and type_ in _SEQUENCES:
        return {"$": _SEQUENCES[type_], "of": [encode_key(entry, path) for entry in value]}
    if type_ in _SEQUENCES and isinstance(value, Iterable):
        return {"$": _SEQUENCES[type_], "of": _children(value, path, child)}
    if type_ in _DICTS and isinstance(value, dict):
        node: dict[str, Any] = {"$": _DICTS[type_]}
        if isinstance(value, collections.defaultdict):
            node["factory"] = _factory_name(value.default_factory, path)
        return {**node, "of": pairs(value.items(), path, child)}
    return _encode_rare(value, path, child)


def _encode_rare(value: object, path: Path, child: Child) -> Any:
    type_ = type(value)
    if isinstance(value, collections.deque) and type_ is collections.deque:
        return {"$": "deque", "maxlen": value.maxlen, "of": _children(value, path, child)}
    if isinstance(value, tuple) and hasattr(type_, "_fields"):
        return {"$": "namedtuple", "class": class_name(type_), "of": _children(value, path, child)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {"$": "dataclass", "class": class_name(type_), "of": pairs(fields, path, child)}
    if isinstance(value, types.SimpleNamespace):
        return {"$": "namespace", "of": pairs(vars(value).items(), path, child)}
    if isinstance(value, range):
        return {"$": "range", "of": [child(v, path) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, slice):
        return {"$": "slice", "of": [child(v, path) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, pathlib.PurePath) and type_.__name__ in _PATHS:
        return {"$": "path", "class": type_.__name__, "text": str(value)}
    if isinstance(value, torch.dtype):
        return {"$": "torch.dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "name": str(value)}
    if isinstance(value, torch.memory_format | torch.layout):
        return {"$": "torch.constant", "name": str(value).removeprefix("torch.")}
    if isinstance(value, np.dtype) and not value.hasobject and value.names is None:
        return {"$": "numpy.dtype", "name": value.str}
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return {"$": "numpy.scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    raise StateError(
        f"{where(path)}: a {class_name(type_)} cannot be stored",
        mend="give it state_dict() and load_state_dict(), or leave it out of the state",
        state_path=where(path),
    )


def _children(values: Iterable[object], path: Path, child: Child) -> list[Any]:
    return [child(value, (*path, str(index))) for index, value in enumerate(values)]


def pairs(items: Iterable[tuple[object, object]], path: Path, child: Child) -> list[Any]:
    """Encode keys and values, in order."""
    return [[encode_key(key, path), child(value, (*path, key))] for key, value in items]


def encode_key(key: object, path: Path) -> Any:
    """Encode the key of a mapping: any plain value that can be hashed."""

    def inner(value: object, at: Path) -> Any:
        return encode(value, at, inner)

    return encode(key, (*path, f"key {key!r}"), inner)


def _enum_name(value: enum.Enum, path: Path) -> str:
    name = value.name
    if name not in type(value).__members__:  # a combination of flags
        raise StateError(f"{where(path)}: {value!r} has no name of its own", mend="store the members one by one")
    return name


def _factory_name(factory: object, path: Path) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise StateError(f"{where(path)}: a defaultdict of {factory!r} cannot be stored", mend="store a plain dict")
    return str(name)


def class_name(type_: type) -> str:
    """Module and qualified name of a class."""
    return f"{type_.__module__}:{type_.__qualname__}"


def find_class(name: str, path: Path, live: object = None) -> type:
    """Find a class by name: that of the live value, or one that is imported already; nothing is imported here."""
    if live is not None and class_name(type(live)) == name:
        return type(live)
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise StateError(f"{where(path)}: class {name} is not there", mend="import its module before restoring")
    return found


def decode(node: Any, path: Path, child: Child, live: object = None) -> Any:
    """Rebuild what :func:`encode` took apart.

    Args:
        node: JSON.
        path: Where it goes in the state.
        child: Called for what a container holds.
        live: What is in the place now, which helps to find classes.

    Raises:
        StateError: It names a class that is not imported, or is of a kind that this version does not know.
    """
    if isinstance(node, list):
        return _decoded(node, path, child)
    if not isinstance(node, dict):
        return node
    kind, of = node.get("$"), node.get("of")
    if kind in DICT_KINDS:
        return _decode_dict(node, path, child)
    if kind in _SEQUENCE_KINDS:
        return _SEQUENCE_KINDS[kind](_decoded(of, path, child))
    if kind == "deque":
        return collections.deque(_decoded(of, path, child), node["maxlen"])
    if kind in ("range", "slice"):
        return (range if kind == "range" else slice)(*_decoded(of, path, child))
    if kind == "namespace":
        return types.SimpleNamespace(**{key: child(value, (*path, key)) for key, value in node["of"]})
    if kind in ("enum", "namedtuple", "dataclass"):
        return _decode_class(node, path, child, live)
    return _decode_leaf(node, path)


def _decoded(of: Any, path: Path, child: Child) -> list[Any]:
    return [child(value, (*path, str(index))) for index, value in enumerate(of)]


def decode_key(node: Any, path: Path) -> Any:
    """Rebuild a key."""

    def inner(value: object, at: Path) -> Any:
        return decode(value, at, inner)

    return inner(node, path)


def _decode_dict(node: dict[str, Any], path: Path, child: Child) -> Any:
    type_ = DICT_KINDS[node["$"]]
    made: dict[Any, Any] = type_()
    if isinstance(made, collections.defaultdict):
        made.default_factory = _FACTORIES.get(node["factory"])
    for key, value in node["of"]:
        plain = decode_key(key, path)
        made[plain] = child(value, (*path, plain))
    return made


def _decode_class(node: dict[str, Any], path: Path, child: Child, live: object) -> Any:
    type_ = find_class(node["class"], path, live)
    if node["$"] == "enum":
        if not issubclass(type_, enum.Enum) or node["name"] not in type_.__members__:
            raise StateError(f"{where(path)}: {node['class']} has no member {node['name']}")
        return type_[node["name"]]
    if node["$"] == "namedtuple":
        make = getattr(type_, "_make", None)
        if not issubclass(type_, tuple) or make is None or len(getattr(type_, "_fields", ())) != len(node["of"]):
            raise StateError(f"{where(path)}: {node['class']} is another class now")
        return make(_decoded(node["of"], path, child))
    if not dataclasses.is_dataclass(type_) or {f.name for f in dataclasses.fields(type_)} != {k for k, _ in node["of"]}:
        raise StateError(f"{where(path)}: {node['class']} has other fields now")
    made = object.__new__(type_)
    for key, value in node["of"]:
        object.__setattr__(made, key, child(value, (*path, key)))
    return made


def _decode_leaf(node: dict[str, Any], path: Path) -> Any:
    kind = node.get("$")
    if kind == "int":
        return int(node["hex"], 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(node["hex"]))[0]
    if kind == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(node["hex"])))
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(node["base64"])
        return data if kind == "bytes" else bytearray(data)
    if kind == "path" and node["class"] in _PATHS:
        return _PATHS[node["class"]](node["text"])
    if kind in ("torch.dtype", "torch.constant"):
        value = getattr(torch, node["name"], None)
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            return value
        raise StateError(f"{where(path)}: this torch has no {node['name']}")
    if kind == "torch.device":
        return torch.device(node["name"])
    if kind == "numpy.dtype":
        return np.dtype(node["name"])
    if kind == "numpy.scalar":
        dtype = np.dtype(node["dtype"])
        return np.frombuffer(bytes.fromhex(node["hex"]), dtype)[0] if dtype.itemsize else dtype.type()
    raise StateError(f"{where(path)}: the checkpoint has a {kind!r} here, which this version does not know")
