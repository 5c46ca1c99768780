"""Everything that a state may hold comes back as it was, from a slot and from a drained file, in place and anew."""

from __future__ import annotations

import collections
import struct

import ckptworld as w
import numpy as np
import pytest
import torch
from torch import nn

from slurm_resil.ckpt.flatten import flatten
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout

pytestmark = pytest.mark.torch


class Box:
    """What it holds is made anew at each restore."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture(params=["local", "drained"])
def anew(tmp_path, request):
    """Gives a value back through storage, as a new one."""
    job, run = w.job(tmp_path), str(tmp_path / "r1")

    def back(value):
        w.save_new(job, {"box": Box(value)})
        other = Box()
        if request.param == "drained":
            w.drain(job, run)
            w.load_drained(run, {"box": other}, 0, 1)
        else:
            w.load(job, {"box": other})
        return other.value

    return back


def all_types() -> list[torch.dtype]:
    return sorted({d for name in dir(torch) if isinstance(d := getattr(torch, name), torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore:.*(quantiz|ComplexHalf)")
def test_every_type_of_this_torch_is_stored_or_refused_by_name():
    refused = set()
    for dtype in all_types():
        name = str(dtype)
        try:
            if name.startswith("torch.q"):
                tensor = torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=dtype)
            else:
                tensor = torch.empty(4 * 16, dtype=torch.uint8).view(dtype)
        except RuntimeError:  # torch itself cannot make one
            refused.add(name)
            continue
        if name in layout.TORCH_DTYPES:
            assert flatten({"a": tensor}).items[0].dtype == name
        else:
            refused.add(name)
            with pytest.raises(StateError, match=rf"a: .*{name}\b"):
                flatten({"a": tensor})
    stored = {str(d) for d in all_types()} - refused
    assert stored == {name for name in layout.TORCH_DTYPES if hasattr(torch, name[6:])}
    assert {"torch.qint8", "torch.quint8", "torch.int4", "torch.uint4", "torch.bits8"} <= refused


@pytest.mark.parametrize(
    "name", ["uint16", "uint64", "float8_e8m0fnu", "float8_e4m3fnuz", "float4_e2m1fn_x2", "complex32"]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_rare_types_made_anew(anew, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.arange(256, dtype=torch.uint8)
    back = anew([raw.view(dtype), torch.empty(0, 2, dtype=dtype)])
    assert back[0].dtype == back[1].dtype == dtype
    assert torch.equal(back[0].view(torch.uint8), raw)
    assert back[1].shape == (0, 2)


def test_bits_of_numbers(anew):
    payload = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    words = torch.tensor([0x7FC00123, 0x7F800001, -(2**31), -(2**31) + 1], dtype=torch.int32)
    back = anew([payload, -payload, -0.0, 5e-324, complex(payload, -0.0), words.view(torch.float32), np.float32(-0.0)])
    assert [struct.pack(">d", x).hex() for x in back[:4]] == [
        "7ff8000000000123",
        "fff8000000000123",
        "8000000000000000",
        "0000000000000001",
    ]
    assert struct.pack(">dd", back[4].real, back[4].imag).hex() == "7ff80000000001238000000000000000"
    assert torch.equal(back[5].view(torch.int32), words)
    assert np.signbit(back[6])


@pytest.mark.parametrize(
    "n", [0, 2**63 - 1, 2**63, -(2**63) - 1, 10**4000, True], ids=lambda n: f"{n.bit_length()} bits"
)
def test_whole_numbers_of_any_size(anew, n):
    back = anew(n)
    assert back == n
    assert type(back) is type(n)


KEYS = [
    *("a.b", "a/b", "a%2Fb", "", ".", "..", "~", "größe", "\u2028", "\U0001f600", "\x00", "\ud800", "k" * 10_000),
    *("k" * 10_001, 1, "1", -1, 2.5, (1, ("x", None)), None, b"k", frozenset({1}), float("inf")),
]


def test_keys_of_all_kinds(anew):
    back = anew({key: torch.tensor([n]) for n, key in enumerate(KEYS)})
    assert [(type(key), key) for key in back] == [(type(key), key) for key in KEYS]
    assert [int(value) for value in back.values()] == list(range(len(KEYS)))


# tensors are more than numbers


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_views_of_one_storage_share_it_again(anew):
    base = torch.arange(4.0, 16.0)
    value = {
        "part": base[3:7],
        "all": base,
        "square": base.view(3, 4).t(),
        "bits": base.view(torch.int32)[5:9],
        "wide": base.view(torch.float64)[1:3],
        "rows": base[1:2].expand(5),
        "sliding": base.unfold(0, 4, 2),
        "apart": base.clone(),
        "same": base,
    }
    want = w.bits(value)
    back = anew(value)
    assert w.bits(back) == want
    assert back["same"] is back["all"]
    for name, tensor in back.items():
        assert shares(tensor, back["all"]) == (name != "apart")
        assert tensor.stride() == value[name].stride()
    for made in (back, value):
        made["all"][3:8] = -1
    assert w.bits(back) == w.bits(value)


def test_only_what_is_seen_of_a_storage_is_made(anew):
    base = torch.arange(10_000.0)
    back = anew([base[9000:9004], base[9002:9008]])
    assert back[0].tolist() == [9000, 9001, 9002, 9003]
    assert shares(*back)
    assert back[0].untyped_storage().nbytes() < 64


@pytest.mark.parametrize("count", [3, 40])
def test_a_dict_that_is_filled_by_the_restore(tmp_path, count):
    """Small or large, a dict of tensors that the state has not yet."""
    base = torch.arange(float(count + 1))
    state = {
        "d": {f"k{n}": base[n : n + 2] for n in range(count)},
        "p": {f"p{n}": nn.Parameter(base) for n in range(count)},
    }
    other: dict = {"d": {}, "p": {}}
    w.save_new(w.job(tmp_path), state)
    w.load(w.job(tmp_path), other)
    assert w.bits(other) == w.bits(state)
    assert all(shares(tensor, other["d"]["k0"]) for tensor in other["d"].values())
    assert all(type(p) is nn.Parameter and shares(p, other["p"]["p0"]) for p in other["p"].values())


class Named(torch.Tensor):
    """A class of tensors without memory of its own."""


def test_classes_and_gradients(anew):
    parameter = nn.Parameter(torch.ones(2))
    value = [
        parameter,
        parameter,
        parameter.data,
        nn.Parameter(torch.zeros(2), requires_grad=False),
        torch.zeros(3, requires_grad=True),
        torch.zeros(3).as_subclass(Named),
        torch.zeros(3, requires_grad=True) * 2,
        torch.ones(1, requires_grad=True).expand(4),
    ]
    back = anew(value)
    assert [(type(x), x.requires_grad, tuple(x.shape)) for x in back] == [
        (type(x), x.requires_grad, tuple(x.shape)) for x in value
    ]
    assert back[0] is back[1]
    assert shares(back[0], back[2])
    assert w.bits(back) == w.bits(value)


def test_what_a_class_adds_would_be_lost():
    odd = torch.zeros(3).as_subclass(Named)
    odd.unit = "m"
    flatten({"in place": odd})
    with pytest.raises(StateError, match=r"box/value/0: a .*Named has attributes of its own"):
        flatten({"box": Box([odd])})


def test_a_class_that_is_not_there_any_more(tmp_path, monkeypatch):
    job = w.job(tmp_path)
    w.save_new(job, {"box": Box(torch.zeros(3).as_subclass(Named))})
    monkeypatch.setitem(globals(), "Named", int)
    with pytest.raises(StateError, match=r"box/value: .*Named is no class of tensors now"):
        w.load(job, {"box": Box()})
    monkeypatch.delitem(globals(), "Named")
    with pytest.raises(StateError, match=r"class .*:Named is not there"):
        w.load(job, {"box": Box()})


def test_gradients_of_what_is_restored_in_place_are_as_the_state_has_them(tmp_path):
    state = {"m": nn.Linear(2, 2), "t": torch.ones(2, requires_grad=True)}
    state["m"].bias.requires_grad_(False)
    other = {"m": nn.Linear(2, 2), "t": torch.zeros(2)}
    other["m"].weight.requires_grad_(False)
    w.save_new(w.job(tmp_path), state)
    w.load(w.job(tmp_path), other)
    assert w.bits(other) == w.bits(state)
    assert [p.requires_grad for p in (*other["m"].parameters(), other["t"])] == [False, True, False]


Pair = collections.namedtuple("Pair", "left right")


REFUSED = {
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"quantised .*qint8"),
    "by channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        r"quantised .*quint8",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
    "subclass of int": (lambda: type("Level", (int,), {})(3), "Level"),
    "subclass of dict": (lambda: type("Config", (dict,), {})(a=1), "Config"),
    "memoryview": (lambda: memoryview(b"x"), "memoryview"),
    "generator function": (lambda: (n for n in range(3)), "generator"),
    "lambda": (lambda: len, "builtin"),
    "system random": (lambda: __import__("random").SystemRandom(), "SystemRandom"),
    "array of objects": (lambda: np.array([None]), "object"),
    "matrix": (lambda: np.asmatrix([[1]]), "matrix"),
}


@pytest.mark.filterwarnings("ignore:.*(CSR|nested|Quantization|quantiz|matrix)")
@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_an_error_that_names_the_path(what):
    make, match = REFUSED[what]
    with pytest.raises(StateError, match=match) as caught:
        flatten({"fine": 1, "outer": {"a.b/c": [0, Pair(1, make())]}})
    assert str(caught.value).startswith("outer/a.b/c/1/1: ")
    many = {f"k{n}": torch.ones(1) for n in range(30)}
    with pytest.raises(StateError, match=match):
        flatten({"many": many | {"odd": make()}})
