from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import pathlib
import struct
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch

from slurm_resil.ckpt import plain
from slurm_resil.core.errors import StateError

pytestmark = pytest.mark.torch


class Colour(enum.Enum):
    RED = "r"


class Number(enum.IntEnum):
    ONE = 1


class Bits(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: tuple[int, ...]


def encode(value):
    def child(inner, path):
        return plain.encode(inner, path, child)

    return child(value, ("top",))


def decode(node):
    def child(inner, path):
        return plain.decode(inner, path, child)

    return child(node, ("top",))


def through(value):
    """As a manifest does it: sorted keys, no NaN."""
    return decode(json.loads(json.dumps(encode(value), sort_keys=True, allow_nan=False)))


VALUES = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    1 << 20000,
    0.1,
    -0.0,
    1e308,
    5e-324,
    "",
    "ä\n\x00\ud800",
    b"",
    bytes(range(256)),
    bytearray(b"xy"),
    complex(-0.0, math.inf),
    [],
    [1, [2, [None]]],
    (),
    (1, ("a", [2.5])),
    {"b": 1, "a": 2},
    {1: "a", "1": "b", None: 0, (1, "x"): [2], 2.5: 1, True and "t": 0, b"k": 1, Colour.RED: 3},
    {"$": "dict", "of": 3},
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.Counter("hello"),
    collections.deque([1, 2], 5),
    {1, 2, 3},
    frozenset(["a"]),
    Colour.RED,
    Number.ONE,
    Bits.B,
    Point(1, 2.5),
    Frozen(1, (2, 3)),
    range(1, 10, 3),
    slice(None, 5, None),
    pathlib.PosixPath("/a/b"),
    types.SimpleNamespace(a=1, b=[2]),
    torch.float32,
    torch.bfloat16,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    torch.channels_last,
    np.dtype("<i4"),
    np.float32(1.5),
    np.float64(-0.0),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2020-01-01T00:00:00", "ns"),
    np.str_("é"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_comes_back_the_same(value):
    back = through(value)
    assert type(back) is type(value)
    assert back == value
    if not (type(value) is int and value.bit_length() > 10000):  # too long for Python to print
        assert repr(back) == repr(value)  # order, sign of zero


@pytest.mark.parametrize(
    "bits",
    [0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x7FF8000000000123, 0xFFF8000000000001, 1 << 63],
)
def test_every_bit_of_a_float(bits):
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert struct.unpack(">Q", struct.pack(">d", through(value)))[0] == bits


def test_defaultdict_keeps_its_factory():
    back = through(collections.defaultdict(list, {"a": [1]}))
    assert back["new"] == []
    assert back["a"] == [1]
    with pytest.raises(StateError, match="top"):
        encode(collections.defaultdict(lambda: 3))


@pytest.mark.parametrize(
    "value", [object(), print, lambda: 1, type, Bits.A | Bits.B, iter([]), memoryview(b"x"), np.void(b"x")]
)
def test_the_rest_is_refused_by_its_path(value):
    if isinstance(value, np.void):
        value = np.array([(1,)], dtype=[("a", "i4")])[0]
    with pytest.raises(StateError, match="top/1/deep"):
        encode([0, {"deep": value}])


@pytest.mark.parametrize(
    "node",
    [
        {"$": "enum", "class": "os:system", "name": "x"},
        {"$": "enum", "class": "not.imported.anywhere:X", "name": "x"},
        {"$": "dataclass", "class": "subprocess:Popen", "of": []},
        {"$": "namedtuple", "class": "os:stat_result", "of": []},
        {"$": "torch.dtype", "name": "load"},
        {"$": "path", "class": "system", "text": "x"},
        {"$": "magic"},
    ],
)
def test_reading_never_calls_what_the_file_names(node):
    with pytest.raises(StateError):
        decode(node)
