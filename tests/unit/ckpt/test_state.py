"""What becomes of each kind of thing in a state, through a slot and back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import random

import ckptworld as w
import numpy as np
import pytest
import torch
from torch import nn

from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.rng import RngState
from slurm_resil.ckpt.state import Sharded
from slurm_resil.core.errors import StateError
from slurm_resil.format import layout
from slurm_resil.format.manifest import Extent

pytestmark = pytest.mark.torch


class Mode(enum.Enum):
    WARM = 1
    COLD = 2


@dataclasses.dataclass
class Progress:
    epoch: int
    best: float
    mode: Mode
    seen: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Fixed:
    epoch: int
    seen: torch.Tensor


class Box:
    """A Stateful of anything."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def there_and_back(tmp_path, state, other):
    job = w.job(tmp_path)
    manifest = w.save_new(job, state)
    want = w.bits(state)
    w.load(job, other)
    assert w.bits(other) == want
    return manifest


def every_bit(dtype: torch.dtype, shape=(4, 6)) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape)) * size
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", layout.TORCH_DTYPES)
def test_every_torch_type_bit_for_bit(tmp_path, name):
    dtype = getattr(torch, name.removeprefix("torch."))
    state = {"t": every_bit(dtype), "scalar": every_bit(dtype, ()), "empty": torch.empty(0, 3, dtype=dtype)}
    other = {key: torch.empty_like(value) for key, value in state.items()}
    for value in other.values():
        value.untyped_storage().fill_(0)
    there_and_back(tmp_path, state, other)


@pytest.mark.parametrize(
    "code", ["<f8", ">f8", "<i2", ">u4", "<c16", "|b1", "<M8[us]", "<U5", "|S3", "<f2", "<f16", "|V3"]
)
def test_every_numpy_type_bit_for_bit(tmp_path, code):
    dtype = np.dtype(code)
    raw = np.random.default_rng(1).integers(0, 2, 24 * dtype.itemsize, np.uint8)
    if dtype.kind == "U":
        raw = np.frombuffer("".join("aéß" for _ in range(400)).encode("utf-32-le"), np.uint8)[: raw.size].copy()
    state = {"a": raw.view(dtype).reshape(4, 6), "scalar": raw.view(dtype)[:1].reshape(()), "none": np.empty(0, dtype)}
    there_and_back(tmp_path, state, {key: np.zeros_like(value) for key, value in state.items()})


def test_structured_arrays(tmp_path):
    dtype = np.dtype([("a", "<i4"), ("b", "<f8", (2,)), ("c", [("d", "|u1")])])
    state = {"a": np.frombuffer(bytes(range(100))[: dtype.itemsize * 4], dtype).copy()}
    there_and_back(tmp_path, state, {"a": np.zeros(4, dtype)})
    there_and_back(tmp_path, {"b": Box(state["a"])}, {"b": Box(None)})
    with pytest.raises(StateError, match="fields"):
        there_and_back(tmp_path, state, {"a": np.zeros(4, np.dtype([("z", "<i4"), ("y", "|V17")]))})


def test_strides_of_all_kinds(tmp_path):
    def views(base: torch.Tensor, array: np.ndarray) -> dict:
        return {
            "transposed": base.t(),
            "strided": base[::2, 1::3],
            "offset": base[3:, 2],
            "channels_last": base.reshape(1, 2, 3, 10).clone().to(memory_format=torch.channels_last),
            "conj": torch.complex(base, base + 1).clone().conj(),
            "negative": torch.complex(base, base + 1).clone().conj().imag,
            "array": array[::-1, ::2],
            "fortran": np.asfortranarray(array),
        }

    state = views(torch.arange(60.0).reshape(6, 10), np.arange(60).reshape(6, 10))
    there_and_back(tmp_path, state, views(torch.zeros(6, 10), np.zeros((6, 10), int)))


def test_expanded_tensors_are_stored_once(tmp_path):
    state = {"e": torch.arange(3.0).reshape(3, 1).expand(3, 1000), "s": torch.tensor(7).expand(50, 60)}
    other = {"e": torch.zeros(3, 1).expand(3, 1000), "s": torch.zeros((), dtype=torch.long).expand(50, 60)}
    manifest = there_and_back(tmp_path, state, other)
    assert manifest.nbytes == 3 * 4 + 8
    dense = {"e": torch.zeros(3, 1000), "s": torch.zeros(50, 60, dtype=torch.long)}
    w.load(w.job(tmp_path), dense)
    assert torch.equal(dense["e"], state["e"])
    assert torch.equal(dense["s"], state["s"])
    box = {"b": Box(state["e"])}
    there_and_back(tmp_path, box, {"b": Box(None)})


def test_shared_memory_is_stored_once_and_restored_shared(tmp_path):
    base = torch.arange(10.0)
    state = {"a": base, "b": base, "view": base.view(2, 5), "box": Box([base, base])}
    other_base = torch.zeros(10)
    other = {"a": other_base, "b": other_base, "view": other_base.view(2, 5), "box": Box(None)}
    manifest = there_and_back(tmp_path, state, other)
    assert [item.name for item in manifest.items] == ["a", "view"]
    first, second = other["box"].value
    assert first is second


def test_overlapping_views_come_back_consistent(tmp_path):
    base = torch.arange(10.0)
    other = torch.zeros(10)
    there_and_back(
        tmp_path,
        {"all": base, "part": base[2:5], "unfolded": base.unfold(0, 4, 1)},
        {"all": other, "part": other[2:5], "unfolded": other.unfold(0, 4, 1)},
    )
    assert torch.equal(other, base)


def test_tied_in_the_state_but_not_in_the_checkpoint_is_refused(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"a": torch.ones(3), "b": torch.zeros(3)})
    tied = torch.full((3,), 9.0)
    with pytest.raises(StateError, match="b: is the same memory as a"):
        w.load(job, {"a": tied, "b": tied})
    assert tied.tolist() == [9.0] * 3
    w.save_new(job, {"a": tied, "b": tied})
    apart = {"a": torch.zeros(3), "b": torch.zeros(3)}
    w.load(job, apart)
    assert apart["a"].tolist() == apart["b"].tolist() == [9.0] * 3


def test_keys_of_all_kinds(tmp_path):
    keys = [
        "a.b",
        "a/b",
        "a%2Fb",
        "",
        ".",
        "..",
        "größe",
        "x" * 70_000,
        "\x00",
        "~1",
        "1",
        1,
        (1, "x"),
        2.5,
        None,
        b"k",
    ]
    state = {"d": {key: torch.tensor([n]) for n, key in enumerate(keys)}, "x/y": 3, "": 4}
    other = {"d": {key: torch.tensor([0]) for key in keys}, "x/y": 0, "": 0}
    manifest = there_and_back(tmp_path, state, other)
    assert len({item.name for item in manifest.items}) == len(keys)


def test_containers_are_restored_in_place(tmp_path):
    def make(n: int) -> dict:
        nested = {"list": [n, {"t": torch.full((2,), float(n))}], "tuple": (n, torch.tensor(n), "s"), "plain": {n: n}}
        return {
            "nested": nested,
            "progress": Progress(n, n / 3, Mode(1 + n % 2), torch.tensor([n])),
            "fixed": Fixed(n, torch.tensor([n])),
            "counter": collections.Counter({"a": n}),
            "grown": [torch.tensor([k]) for k in range(n)],
            "none": None if n == 2 else n,
            "big": bytes([n]) * 10_000,
            "mode": Mode(1 + n % 2),
        }

    state, other = make(2), make(5)
    keep = {key: other[key] for key in ("nested", "progress", "counter", "grown")}
    tensor, inner = other["nested"]["list"][1]["t"], other["nested"]["plain"]
    there_and_back(tmp_path, state, other)
    assert all(other[key] is value for key, value in keep.items())
    assert other["nested"]["list"][1]["t"] is tensor
    assert other["nested"]["plain"] is inner
    assert dataclasses.asdict(other["progress"]) == dataclasses.asdict(state["progress"])
    assert dataclasses.asdict(other["fixed"]) == dataclasses.asdict(state["fixed"])


def test_generators_go_on_where_they_were(tmp_path):
    def make(seed: int) -> dict:
        return {
            "torch": torch.Generator().manual_seed(seed),
            "python": random.Random(seed),
            "pcg": np.random.default_rng(seed),
            "philox": np.random.Generator(np.random.Philox(seed)),
            "legacy": np.random.RandomState(seed),
            "inside": Box({"g": torch.Generator().manual_seed(seed), "n": np.random.default_rng(seed)}),
        }

    def draw(state: dict) -> list:
        found = [torch.rand(3, generator=state["torch"]).tolist(), state["python"].gauss(0, 1)]
        found += [state["pcg"].normal(size=3).tolist(), state["philox"].integers(9, size=3).tolist()]
        found += [state["legacy"].normal(size=3).tolist(), torch.rand(2, generator=state["inside"].value["g"]).tolist()]
        return [*found, state["inside"].value["n"].random()]

    state, other = make(1), make(2)
    draw(state)
    job = w.job(tmp_path)
    w.save_new(job, state)
    draw(other)
    w.load(job, other)
    assert draw(other) == draw(state)
    with pytest.raises(StateError, match=r"pcg: a .* of PCG64 in the checkpoint"):
        w.load(job, {**make(1), "pcg": np.random.Generator(np.random.MT19937(1))})


def test_global_generators(tmp_path):
    def draw() -> list:
        return [random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(2).tolist()]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draw()
    job = w.job(tmp_path)
    w.save_new(job, {"rng": RngState()})
    want = draw()
    w.load(job, {"rng": RngState()})
    assert draw() == want


class Hooked(nn.Module):
    """Hands out a copy of a buffer, and extra state; keeps something out of its state dict."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(n)))
        self.register_buffer("kept", torch.full((3,), float(n)))
        self.register_buffer("derived", torch.full((3,), 7.0), persistent=False)
        self.extra = {"n": n, "t": torch.tensor([n])}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kept"] = self.kept.clone() * 2

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "kept"] = state_dict[prefix + "kept"] / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_modules_that_hand_out_copies(tmp_path):
    state, other = {"m": nn.Sequential(Hooked(1), Hooked(2))}, {"m": nn.Sequential(Hooked(3), Hooked(4))}
    there_and_back(tmp_path, state, other)
    assert other["m"][1].kept.tolist() == [2.0] * 3
    assert other["m"][0].extra == state["m"][0].extra
    assert other["m"][0].derived.tolist() == [7.0] * 3


def test_wrappers_do_not_change_names(tmp_path):
    model = w.Net()
    names = [item.name for item in flatten({"model": model}).items]
    assert names == [item.name for item in flatten({"model": nn.DataParallel(model)}).items]
    assert names == [item.name for item in flatten({"model": torch.compile(model, backend="eager")}).items]


def test_optimizer_state_goes_by_the_name_of_the_parameter():
    state = w.training(1, 1)
    names = {item.name for item in flatten(state).items}
    assert "optimizer/state/model/middle.weight/exp_avg" in names
    alone = {"optimizer": state["optimizer"]}
    assert "optimizer/state/#1/exp_avg" in {item.name for item in flatten(alone).items}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True, capturable=False, foreach=False),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:], "weight_decay": 0.2}]),
    ],
    ids=["sgd", "tensor-lr", "adafactor", "lbfgs", "groups"],
)
def test_optimizers(tmp_path, make):
    def build(seed: int):
        torch.manual_seed(seed)
        model = nn.Linear(6, 5)
        return model, make(list(model.parameters()))

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 6)) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = build(1)
    step(model, optimizer)
    step(model, optimizer)
    for steps in (0, 1):
        model2, optimizer2 = build(2)
        for _ in range(steps):
            step(model2, optimizer2)
        there_and_back(tmp_path, {"m": model, "o": optimizer}, {"m": model2, "o": optimizer2})
    step(model, optimizer)
    step(model2, optimizer2)
    assert w.bits(model) == w.bits(model2)
    assert w.bits(optimizer) == w.bits(optimizer2)


def test_the_precision_of_optimizer_state_is_kept(tmp_path):
    """torch's own load_state_dict would cast it to the parameter's type."""

    def build():
        model = nn.Linear(3, 3).to(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape, dtype=torch.float32)
    model2, optimizer2 = build()
    there_and_back(tmp_path, {"m": model, "o": optimizer}, {"m": model2, "o": optimizer2})


def test_an_optimizer_with_hooks_goes_through_its_own_methods(tmp_path):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer, optimizer2 = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    called = []
    optimizer2.register_load_state_dict_pre_hook(lambda *_: called.append(1))
    optimizer.register_state_dict_post_hook(lambda _, state: None)
    there_and_back(tmp_path, {"m": model, "o": optimizer}, {"m": other, "o": optimizer2})
    assert called


def test_restoring_an_earlier_state_removes_what_came_later(tmp_path):
    state = w.training(1, 0)
    there_and_back(tmp_path, state, w.training(2, 3))


def test_what_the_user_says_is_sharded(tmp_path):
    extents = (Extent(local=(0,), start=(4,), shape=(2,)), Extent(local=(2,), start=(8,), shape=(2,)))
    state = {"s": Sharded(tensor=torch.arange(4.0), global_shape=(10,), extents=extents)}
    (item,) = flatten(state).items
    assert (item.sharing, item.global_shape, item.extents) == ("sharded", (10,), extents)
    other = {"s": Sharded(tensor=torch.zeros(4), global_shape=(10,), extents=extents)}
    w.save_new(w.job(tmp_path), state)
    w.load(w.job(tmp_path), other)
    assert other["s"].tensor.tolist() == [0, 1, 2, 3]
    for bad in (
        (extents[0],),
        (Extent(local=(3,), start=(0,), shape=(4,)),),
        (Extent(local=(0,), start=(7,), shape=(4,)),),
    ):
        with pytest.raises(StateError, match="s: "):
            flatten({"s": Sharded(tensor=torch.zeros(4), global_shape=(10,), extents=bad)})


class Wrapped(torch.Tensor):
    """A subclass that says nothing of its data: no operation on it may be tried before it is refused."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


REFUSED = {
    "object": object(),
    "function": print,
    "class": nn.Linear,
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "bits": torch.empty(1, dtype=torch.uint8).view(torch.bits8),
    "lazy": nn.LazyLinear(3),
    "wrapper": torch.Tensor._make_subclass(Wrapped, torch.ones(3)),
    "objects": np.array([object()]),
    "masked": np.ma.masked_array([1.0], [True]),
    "set-of-tensors": {torch.ones(1)},
    "tensor-key": {torch.ones(1): 1},
    "module-in-stateful": Box(nn.Linear(1, 1)),
    "broken": type("Broken", (), {"state_dict": lambda _: 1 / 0, "load_state_dict": print})(),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_stored_is_named_by_its_path(value):
    with pytest.raises(StateError, match="outer/1/bad"):
        flatten({"fine": 1, "outer": [0, {"bad": value}]})


def test_a_state_that_contains_itself_is_refused():
    loop: list = []
    loop.append({"again": loop})
    with pytest.raises(StateError, match="contains itself"):
        flatten({"x": loop})
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(StateError, match="levels deep"):
        flatten({"x": deep})


def test_no_pickle(tmp_path, monkeypatch):
    """Neither way goes through pickle."""
    import pickle

    for name in ("dumps", "dump", "loads", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("pickle"))
    there_and_back(tmp_path, w.training(1, 2), w.training(2))


def test_bits_that_negate_are_part_of_what_a_tensor_is(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"a": numbers.imag, "b": numbers.conj().imag}
    assert torch.equal(state["a"], -state["b"])
    assert len(flatten(state).items) == 2
    before = {name: tensor.tolist() for name, tensor in state.items()}
    job = w.job(tmp_path)
    w.save_new(job, state)
    fresh = {"a": torch.zeros(2), "b": torch.zeros(2)}
    w.load(job, fresh)
    assert {name: tensor.tolist() for name, tensor in fresh.items()} == before


def test_empty_scalars_of_numpy_come_back(tmp_path):
    state = {"text": np.str_(""), "bytes": np.bytes_(b"")}
    job = w.job(tmp_path)
    w.save_new(job, state)
    fresh = {"text": np.str_("x"), "bytes": np.bytes_(b"x")}
    w.load(job, fresh)
    assert (fresh["text"], fresh["bytes"]) == ("", b"")
    assert (type(fresh["text"]), type(fresh["bytes"])) == (np.str_, np.bytes_)


def test_an_array_that_could_not_be_restored_is_not_saved():
    array = np.arange(3)
    array.flags.writeable = False
    with pytest.raises(StateError, match="outer/x: a read-only array"):
        flatten({"outer": {"x": array}})
