"""What is remembered from save to save never shows: with it and without it a state is taken apart the same way."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.memo import MISSES, Memo
from slurm_resil.core.errors import StateError

State = dict[str, Any]
# what a mutation would change is not there any more
GONE = (RuntimeError, AttributeError, ValueError, KeyError, IndexError, StopIteration)


def make() -> State:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    many = {f"t{index}": torch.randn(3, 5) for index in range(20)}
    return {
        "optimizer": optimizer,  # before the model, on whose names it depends
        "model": model,
        "many": many,
        "generator": torch.Generator(),
        "iteration": 1,
    }


def looked_at(flat: Any) -> list[Any]:
    found = []
    for item, source in zip(flat.items, flat.sources, strict=True):
        place = (source.data_ptr(), source.stride(), str(source.dtype)) if item.name != "generator" else None
        found.append((item, tuple(source.shape), place))
    return found


def check(state: State, memo: Memo) -> None:
    try:
        without = flatten(state)
    except StateError as error:
        with pytest.raises(StateError) as info:
            flatten(state, memo)
        assert str(info.value) == str(error)
        return
    with_it = flatten(state, memo)
    assert looked_at(with_it) == looked_at(without)
    assert with_it.values == without.values
    assert with_it.items is memo.items


def first(state: State) -> nn.Linear:
    return state["model"][0]


def assign(state: State, make_data: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = first(state).weight
    weight.data = make_data(weight.data)


def rename(state: State) -> None:
    layer = first(state)
    weight = layer.weight
    del layer.weight
    layer.register_parameter(f"other{len(layer._parameters)}", weight)


def step(state: State) -> None:
    state["model"](torch.randn(8, 4)).sum().backward()
    state["optimizer"].step()


def alias(state: State) -> None:
    """Something before the model has the memory of one of its tensors; it is a new tensor each time."""
    state.pop("early", None)
    rest = dict(state)
    state.clear()
    state["early"] = first(rest).weight.data
    state.update(rest)


MUTATIONS: dict[str, Callable[[State], Any]] = {
    "nothing": lambda s: None,
    "trained": step,
    "plain value": lambda s: s.update(iteration=s["iteration"] + 1),
    "learning rate": lambda s: s["optimizer"].param_groups[0].update(lr=random.random()),
    "moved": lambda s: assign(s, torch.clone),
    "another shape there": lambda s: assign(s, lambda d: d.view(-1)),
    "transposed there": lambda s: assign(s, lambda d: d.t()),
    "another type there": lambda s: s["many"]["t2"].__setattr__("data", s["many"]["t2"].data.view(torch.int32)),
    "half as large": lambda s: assign(s, lambda d: d.view(-1)[: max(1, d.numel() // 2)]),
    "another precision": lambda s: s["model"][2].to(torch.float64),
    "renamed": rename,
    "one more parameter": lambda s: first(s).register_parameter(
        f"p{random.randrange(10**6)}", nn.Parameter(torch.ones(2))
    ),
    "a new buffer": lambda s: s["model"][1].register_buffer("running_mean", torch.randn(6)),
    "another layer": lambda s: s["model"].__setitem__(0, nn.Linear(4, 6)),
    "tied": lambda s: s["model"][2].__setattr__("weight", nn.Parameter(torch.ones(3, 6))),
    "one more group": lambda s: s["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "a new state": lambda s: s["optimizer"].state[first(s).weight].update(exp_avg=torch.zeros(4)),
    "a plain state": lambda s: s["optimizer"].state[first(s).weight].update(n=random.randrange(3)),
    "no state": lambda s: s["optimizer"].state.clear(),
    "another entry": lambda s: s["many"].update(t3=torch.randn(3, 5)),
    "an entry twice": lambda s: s["many"].update(t3=s["many"]["t4"]),
    "an entry less": lambda s: s["many"].pop(next(iter(s["many"]))),
    "entries in another order": lambda s: s.update(many=dict(sorted(s["many"].items(), key=lambda e: random.random()))),
    "an entry of another kind": lambda s: s["many"].update(t5=5),
    "an entry that is complex": lambda s: s["many"].update(t6=torch.randn(2, dtype=torch.complex64).conj()),
    "an entry that is expanded": lambda s: s["many"].update(t7=torch.ones(1, 5).expand(3, 5)),
    "shared with the model": lambda s: s["many"].update(t8=first(s).weight),
    "shared from before": alias,
    "another optimizer": lambda s: s.update(optimizer=torch.optim.SGD(s["model"].parameters(), momentum=0.9)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_sees_what_has_changed(name: str) -> None:
    state, memo = make(), Memo()
    check(state, memo)
    check(state, memo)
    assert memo.replaying
    for number in range(3):
        with contextlib.suppress(*GONE) if number else contextlib.nullcontext():
            MUTATIONS[name](state)
        check(state, memo)
        check(state, memo)


@pytest.mark.parametrize("seed", range(8))
def test_it_sees_it_in_any_order(seed: int) -> None:
    random.seed(seed)
    state, memo = make(), Memo()
    for _ in range(60):
        for name in random.choices(list(MUTATIONS), k=random.randrange(3)):
            with contextlib.suppress(*GONE):
                MUTATIONS[name](state)
        check(state, memo)


def test_what_stays_is_not_looked_at_anew() -> None:
    state, memo = make(), Memo()
    before = flatten(state, memo)
    step(state)
    after = flatten(state, memo)
    assert after.items is before.items
    assert after.segments is before.segments
    assert len(after.segments) == 4  # names and state of the optimizer, model, dict
    nodes = {id(node) for node in after.segments}
    assert id(dict(after.values["of"])["model"]["of"]) in nodes


def test_it_keeps_nothing_alive() -> None:
    state, memo = make(), Memo()
    flatten(state, memo)
    watched = [weakref.ref(first(state).weight), weakref.ref(state["many"]["t1"])]
    state.clear()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_what_always_changes_is_not_tried_for_ever() -> None:
    state, memo = make(), Memo()
    flatten(state, memo)
    for _ in range(MISSES):
        state["many"] = {name: tensor.clone() for name, tensor in state["many"].items()}
        check(state, memo)
        assert not memo.replaying
    state["many"] = {name: tensor.clone() for name, tensor in state["many"].items()}
    check(state, memo)
    assert memo.replaying  # the rest is remembered
