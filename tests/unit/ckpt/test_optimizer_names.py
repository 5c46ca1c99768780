"""What an optimizer keeps goes by names of parameters: their order, their groups and their number may change."""

from __future__ import annotations

import ckptworld as w
import pytest
import torch
from torch import nn

from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.core.errors import StateError

pytestmark = pytest.mark.torch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def build(groups, seed: int = 1, steps: int = 0, make=torch.optim.AdamW) -> dict:
    """Make a state; ``groups`` are (names of layers or parameters, hyperparameters)."""
    torch.manual_seed(seed)
    model = Model()
    by_name = dict(model.named_parameters())

    def parameters(names):
        return [p for part in names for name, p in by_name.items() if name == part or name.startswith(f"{part}.")]

    optimizer = make([{"params": parameters(names), **rest} for names, rest in groups], lr=0.1)
    used = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in used)
    state = {"m": model, "o": optimizer}
    run(state, steps)
    return state


def run(state: dict, steps: int) -> None:
    for n in range(steps):
        state["o"].zero_grad()
        state["m"](torch.full((3, 4), float(n + 1))).pow(2).sum().backward()
        state["o"].step()


def by_name(state: dict) -> dict:
    """State and hyperparameters of each parameter that the optimizer has."""
    names = {id(p): name for name, p in state["m"].named_parameters()}
    found = {}
    for group in state["o"].param_groups:
        rest = {key: value for key, value in group.items() if key != "params"}
        for p in group["params"]:
            found[names[id(p)]] = (w.bits(state["o"].state.get(p)), rest)
    return found


ONE = [(["first", "second", "third"], {"weight_decay": 0.1})]
TWO = [(["first", "second"], {"weight_decay": 0.1}), (["third"], {"weight_decay": 0.0, "lr": 0.2})]


@pytest.mark.parametrize("drained", [False, True], ids=["local", "drained"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (ONE, [(["third", "first", "second"], {"weight_decay": 0.5})]),
        (TWO, [(["third"], {"weight_decay": 0.7}), (["second", "first"], {"weight_decay": 0.6})]),
        (TWO, [(["second.bias", "first", "second.weight"], {}), (["third.bias", "third.weight"], {})]),
    ],
    ids=["order", "groups", "both"],
)
def test_another_order(tmp_path, saved, now, steps, drained):
    job, run_dir = w.job(tmp_path), str(tmp_path / "r1")
    state, other = build(saved, 1, 2), build(now, 2, steps)
    want = by_name(state)
    w.save_new(job, state)
    if drained:
        w.drain(job, run_dir)
        report = w.load_drained(run_dir, other, 0, 1).report
    else:
        report = w.load(job, other).report
    assert not report
    assert by_name(other) == want
    run(state, 3)
    run(other, 3)
    assert by_name(other) == by_name(state)
    assert w.bits(other["m"]) == w.bits(state["m"])


def test_names_in_groups_are_those_of_the_state(tmp_path):
    """``named_parameters()`` puts names into the groups; they belong to the order that the state has."""

    def make(order):
        model = Model()
        named = dict(model.named_parameters())
        return {"m": model, "o": torch.optim.SGD([(name, named[name]) for name in order], lr=0.1)}

    names = [name for name, _ in Model().named_parameters()]
    job = w.job(tmp_path)
    w.save_new(job, make(names))
    other = make(names[::-1])
    w.load(job, other)
    assert other["o"].param_groups[0]["param_names"] == names[::-1]


def load(tmp_path, saved, other, **options):
    job = w.job(tmp_path)
    w.save_new(job, saved)
    return w.load(job, other, options=LoadOptions(**options)).report


def test_a_frozen_layer(tmp_path):
    """The checkpoint has state of what is not trained any more."""
    state, other = build(ONE, 1, 2), build([(["first", "third"], {})], 2, 1)
    before = w.bits(other["m"]), by_name(other)
    with pytest.raises(StateError, match=r"o/state/m/second.weight: is in the checkpoint, not in the state"):
        load(tmp_path, state, other)
    assert (w.bits(other["m"]), by_name(other)) == before
    for options in ({"allow_unexpected": True}, {"exclude": "o/state/m/second.*"}):
        other = build([(["first", "third"], {})], 2, 1)
        report = load(tmp_path, state, other, **options)
        assert sorted(report.skipped or report.unexpected) == ["o/state/m/second.bias", "o/state/m/second.weight"]
        want = {name: value for name, value in by_name(state).items() if not name.startswith("second")}
        assert by_name(other) == want
        run(other, 1)


@pytest.mark.parametrize("own_group", [False, True])
def test_a_layer_that_is_new_to_the_optimizer(tmp_path, own_group):
    now = [(["first", "third"], {"weight_decay": 0.3}), (["second"], {"lr": 0.9})] if own_group else ONE
    state, other = build([(["first", "third"], {"weight_decay": 0.2})], 1, 2), build(now, 2, 1)
    with pytest.raises(StateError, match=r"o/state/m/second.weight: is in the state, not in the checkpoint"):
        load(tmp_path, state, other)
    before, want = by_name(other), by_name(state)
    report = load(tmp_path, state, other, allow_missing=True)
    assert {"o/state/m/second.bias", "o/state/m/second.weight"} <= set(report.missing)
    found = by_name(other)
    for name in found:
        if name.startswith("second"):
            assert found[name][0] == before[name][0]
            assert found[name][1]["lr"] == (0.9 if own_group else 0.1)
            assert found[name][1]["weight_decay"] == (before[name][1]["weight_decay"] if own_group else 0.2)
        else:
            assert found[name] == want[name]
    assert ("o/groups/1" in report.missing) == own_group
    run(other, 1)


@pytest.mark.parametrize(("saved", "now"), [(ONE, TWO), (TWO, ONE)], ids=["split", "merged"])
def test_other_groups_need_a_word(tmp_path, saved, now):
    """Which hyperparameters would hold is anybody's guess; without them it is clear."""
    state, other = build(saved, 1, 2), build(now, 2, 1)
    with pytest.raises(StateError, match=r"has its parameters in other groups in the checkpoint; exclude 'o/groups'"):
        load(tmp_path, state, other)
    rest = {name: entry[1] for name, entry in by_name(other).items()}
    report = load(tmp_path, state, other, exclude="o/groups")
    assert any(path.startswith("o/groups") for path in report.skipped)
    want = by_name(state)
    assert by_name(other) == {name: (want[name][0], rest[name]) for name in want}


def test_what_has_no_names_or_one_state_for_all_needs_the_order(tmp_path):
    state, other = build(ONE, 1, 2), build([(["second", "first", "third"], {})], 2)
    with pytest.raises(StateError, match="o: has its parameters in another order or in other groups, and no module"):
        load(tmp_path, {"o": state["o"]}, {"o": build(TWO, 2)["o"]})
    del state["o"], other["o"]
    for one in (state, other):
        one["o"] = torch.optim.LBFGS(one["m"].parameters(), max_iter=2)

    def closure():
        state["o"].zero_grad()
        loss = state["m"](torch.ones(3, 4)).pow(2).sum()
        loss.backward()
        return loss

    state["o"].step(closure)
    other["o"].param_groups[0]["params"].reverse()
    with pytest.raises(StateError, match="keeps one state for all of them together"):
        load(tmp_path, state, other)
