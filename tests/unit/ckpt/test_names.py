"""A checkpoint that was taken with wrappers inside a model restores without them, and the other way round."""

from __future__ import annotations

import ckptworld as w
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from slurm_resil.ckpt import names
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.core.errors import StateError

pytestmark = pytest.mark.torch


class Extra(nn.Linear):
    """Has extra state, which only ``load_state_dict`` can take; and a child whose name is one of a wrapper's."""

    def __init__(self, n: int) -> None:
        super().__init__(4, 4)
        self.module = nn.Linear(4, 4)
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(super().forward(x))

    def get_extra_state(self) -> int:
        return self.n

    def set_extra_state(self, state: int) -> None:
        self.n = state


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "nothing": lambda module: module,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "data parallel": nn.DataParallel,
    "checkpoint around compile": lambda module: checkpoint_wrapper(compiled(module)),
    "compile around checkpoint": lambda module: compiled(checkpoint_wrapper(module)),
    "compile around data parallel around checkpoint": lambda module: compiled(
        nn.DataParallel(checkpoint_wrapper(module))
    ),
}


def training(seed: int, wrap, *, backwards: bool = False) -> dict:
    """A model whose inner parts are wrapped, after a step; the same values whatever the wrappers."""
    torch.manual_seed(seed)
    middle = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Extra(seed))
    model = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 1))
    rows = list(model.parameters())
    optimizer = torch.optim.AdamW(rows[::-1] if backwards else rows, lr=0.01)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    middle[0] = wrap(middle[0])
    model[1] = wrap(middle)
    return {"m": model, "o": optimizer}


def values(state: dict) -> object:
    """Everything in it, by the order of the parameters: names are what wrappers change."""
    model, optimizer = state["m"], state["o"]
    moments = [w.bits(optimizer.state[parameter]) for parameter in model.parameters()]
    (extra,) = (module.n for module in model.modules() if isinstance(module, Extra))
    return [w.bits(list(model.parameters())), w.bits(list(model.buffers())), moments, extra]


@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize("taken", [True, False])
def test_wrappers_inside_a_model_do_not_change_names(tmp_path, how, taken):
    plain, wrapped = training(1, WRAPPERS["nothing"]), training(1, WRAPPERS[how])
    saved = wrapped if taken else plain
    assert [item.name for item in flatten(wrapped).items] == [item.name for item in flatten(plain).items]
    job = w.job(tmp_path)
    w.save_new(job, saved)
    other = training(2, WRAPPERS["nothing"] if taken else WRAPPERS[how], backwards=True)
    assert values(other) != values(saved)
    w.load(job, other)
    assert values(other) == values(saved)


def test_a_child_that_is_called_like_a_wrappers_is_one():
    model = nn.Sequential(compiled(Extra(1)))
    found = [names.plain_name(model, name) for name in model.state_dict()]
    assert found == ["0.weight", "0.bias", "0._extra_state", "0.module.weight", "0.module.bias"]


def test_two_that_have_the_same_name_without_wrappers_are_both_named():
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    model[0].register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(StateError, match=r"m: '0.weight' and '0.module.weight' have the same name, '0.weight'"):
        flatten({"m": model})
