"""Everything is compared and verified before the first byte is changed."""

from __future__ import annotations

import os

import ckptworld as w
import numpy as np
import pytest
import torch
from torch import nn

from slurm_resil.core import paths
from slurm_resil.core.errors import DataError, StateError
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch


class Keeper:
    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


def change_dtype(state):
    state["model"].middle.to(torch.bfloat16)


def change_shape(state):
    state["model"].middle = nn.Linear(8, 9)


def more(state):
    state["model"].extra = nn.Linear(1, 1)


def fewer(state):
    del state["model"].middle


def other_key(state):
    state["epoch"] = state.pop("position")


def other_optimizer(state):
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=1.0, momentum=0.9)


def other_groups(state):
    parameters = list(state["model"].parameters())
    state["optimizer"] = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


def swapped_kinds(state):
    state["model"], state["optimizer"] = state["optimizer"], state["model"]


def tensor_for_value(state):
    state["position"] = torch.zeros(3)


def value_for_generator(state):
    state["generator"] = 3


CHANGES = {
    change_dtype: "model/middle.weight: torch.float32 in the checkpoint, torch.bfloat16 in the state",
    change_shape: r"model/middle.weight: shape \(8, 8\) in the checkpoint, \(9, 8\) in the state",
    more: "model/extra.weight: is in the state, not in the checkpoint",
    fewer: "model/middle.weight: is in the checkpoint, not in the state",
    other_key: "epoch: is in the state, not in the checkpoint; position: is in the checkpoint, not in the state",
    other_optimizer: "optimizer: AdamW in the checkpoint, SGD in the state",
    other_groups: "optimizer/groups/1: has its parameters in other groups in the checkpoint",
    swapped_kinds: "model: a module in the checkpoint, a optimizer in the state",
    tensor_for_value: "position: a value in the checkpoint, a tensor in the state",
    value_for_generator: "generator: a torch.Generator in the checkpoint, a int in the state",
}


@pytest.mark.parametrize("drained", [False, True], ids=["local", "drained"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_another_state_is_refused_whole(tmp_path, change, drained):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    w.save_new(job, w.training(1, 2))
    other = w.training(2, 1)
    change(other)
    before = w.bits(other)
    with pytest.raises(StateError, match=CHANGES[change]) as caught:
        if drained:
            w.drain(job, run)
            w.load_drained(run, other, 0, 1)
        else:
            w.load(job, other)
    assert "the state does not fit the checkpoint" in str(caught.value)
    assert w.bits(other) == before


def test_only_the_first_differences_are_listed(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"m": nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))})
    with pytest.raises(StateError, match="and 55 more") as caught:
        w.load(job, {"m": nn.Sequential(*(nn.Linear(3, 2) for _ in range(30))).double()})
    assert len(str(caught.value)) < 1000


def test_types_inside_of_objects_are_compared_too(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"k": Keeper(ema=[torch.ones(3)], array=np.ones(2), size=1)})
    for bad in ({"ema": [torch.ones(3).double()]}, {"array": np.ones(2, np.float32)}):
        other = {"k": Keeper(**bad)}
        with pytest.raises(StateError, match=r"k/(ema/0|array): .* in the checkpoint"):
            w.load(job, other)
        assert other["k"].values is bad or w.bits(other["k"].values) == w.bits(bad)
    other = {"k": Keeper(ema=[], new=3)}
    w.load(job, other)
    assert other["k"].values["size"] == 1


def test_containers_with_tensors_must_match_and_plain_ones_may_change(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"d": {"t": torch.ones(2), "note": "x", "new": {"a": 1}}, "h": [1, 2]})
    other = {"d": {"t": torch.zeros(2), "old": 3}, "h": []}
    w.load(job, other)
    assert list(other["d"]) == ["t", "note", "new"]
    assert other["h"] == [1, 2]
    for bad in ({"t": torch.zeros(2), "u": torch.zeros(1)}, {"u": torch.zeros(2)}, {}):
        state = {"d": bad, "h": []}
        if bad:
            with pytest.raises(StateError, match="d/"):
                w.load(job, state)
        else:  # to be filled
            w.load(job, state)
            assert torch.equal(state["d"]["t"], torch.ones(2))


def test_what_cannot_be_changed_is_told_before(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"a": np.ones(2), "n": 1})
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(StateError, match="a: is a read-only array"):
        w.load(job, {"a": frozen, "n": 0})
    import types

    with pytest.raises(StateError, match="n: cannot be restored"):
        w.load(job, types.MappingProxyType({"a": np.zeros(2), "n": 0}))


def test_an_object_that_refuses_its_state_is_named(tmp_path):
    class Picky(Keeper):
        def load_state_dict(self, state):
            raise KeyError("nothing")

    job = w.job(tmp_path)
    w.save_new(job, {"m": nn.Linear(2, 2), "k": Keeper(a=1)})
    other = {"m": nn.Linear(2, 2), "k": Picky()}
    before = w.bits(other["m"])
    with pytest.raises(StateError, match=r"k: Picky.load_state_dict\(\) failed: KeyError\('nothing'\)"):
        w.load(job, other)
    assert w.bits(other["m"]) == before


@pytest.mark.parametrize("drained", [False, True], ids=["local", "drained"])
def test_a_flipped_bit_anywhere_changes_nothing(tmp_path, drained):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    manifest = w.save_new(job, w.training(1, 2))
    path = paths.slot(job, 0, 0)
    items: list = list(manifest.items)
    if drained:
        stored = w.drain(job, run)
        path, items = os.path.join(run, stored.file), list(stored.items)
    other = w.training(2, 1)
    before = w.bits(other)
    for item in items:
        for at in {0, item.nbytes // 2, item.nbytes - 1}:
            w.flip(path, item.offset + at)
            with pytest.raises(DataError, match="do not match their hash") as caught:
                w.load_drained(run, other, 0, 1) if drained else w.load(job, other)
            assert caught.value.context["fault"] == "flipped"
            assert w.bits(other) == before
            w.flip(path, item.offset + at)
    w.load_drained(run, other, 0, 1) if drained else w.load(job, other)


def test_a_manifest_whose_values_name_what_it_has_not(tmp_path):
    import dataclasses

    job = w.job(tmp_path)
    manifest = w.save_new(job, {"a": torch.ones(2), "b": torch.ones(3)})
    path = paths.manifest(job, 1, 0)
    dataclasses.replace(manifest, items=manifest.items[:1]).publish(path, sync=False)
    with pytest.raises(DataError, match="its items do not"):
        w.load(job, {"a": torch.ones(2), "b": torch.ones(3)})
    assert ShardManifest.load(path)


def test_training_goes_on_bit_for_bit(tmp_path):
    job = w.job(tmp_path)
    straight = w.training(1, 3)
    w.save_new(job, straight)
    w.train(straight, 4)
    for steps in (0, 2):
        resumed = w.training(9, steps)
        w.load(job, resumed)
        w.train(resumed, 4)
        assert w.bits(resumed) == w.bits(straight)


def test_a_restore_in_inference_mode_can_be_trained_on(tmp_path):
    """The restore makes optimizer state that is not there yet; the next iteration has to be able to change it."""
    job = w.job(tmp_path)
    saved, other = w.training(1, 2), w.training(2)
    with torch.inference_mode():
        w.save_new(job, saved)
        w.load(job, other)
    assert w.bits(other) == w.bits(saved)
    for state in (saved, other):
        w.train(state, 2)
    assert w.bits(other) == w.bits(saved)
