"""A model built on the meta device gets its memory from the restore, and stays the objects that it is."""

from __future__ import annotations

import ckptworld as w
import pytest
import torch
from torch import nn

from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.core.errors import DataError, StateError, UsageError

pytestmark = pytest.mark.torch


def on_meta(seed: int = 2) -> dict:
    """A state as scripts build it: the optimizer and the schedule before there is any memory."""
    with torch.device("meta"):
        model = w.Net()
    state = w.training(seed)
    state["model"] = model
    state["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)
    state["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], T_max=50)
    return state


@pytest.mark.parametrize("drained", [False, True], ids=["local", "drained"])
def test_training_goes_on_bit_for_bit(tmp_path, drained):
    job, run = w.job(tmp_path), str(tmp_path / "r1")
    straight, resumed = w.training(1, 3), on_meta()
    w.save_new(job, straight)
    w.train(straight, 3)
    before = list(resumed["model"].parameters())
    assert flatten(resumed, meta=True).nbytes < flatten(straight).nbytes  # no state of the optimizer yet
    if drained:
        w.drain(job, run)
        w.load_drained(run, resumed, 0, 1)
    else:
        w.load(job, resumed)
    model = resumed["model"]
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" and p.requires_grad for p in model.parameters())
    assert model.head.weight is model.token.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    w.train(resumed, 3)
    assert w.bits(resumed) == w.bits(straight)
    w.save_new(job, resumed, iteration=2)


def test_an_optimizer_made_afterwards(tmp_path):
    job = w.job(tmp_path)
    state = w.training(1, 3)
    w.save_new(job, state)
    with torch.device("meta"):
        model = w.Net()
    report = w.load(job, {"model": model}, options=LoadOptions(include="model")).report
    assert "optimizer" in report.skipped
    assert w.bits(model) == w.bits(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(16)).sum().backward()
    optimizer.step()


def test_it_keeps_what_is_set_on_parameters(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"m": nn.Linear(3, 3)})
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    model.weight.no_decay = True
    model.bias.requires_grad_(False)
    w.load(job, {"m": model})
    assert model.weight.no_decay
    assert not model.bias.requires_grad


def test_views_of_one_storage_stay_views(tmp_path):
    def make(device):
        base = torch.arange(12.0, device=device).reshape(3, 4)
        return {"base": base, "column": base[:, 1], "again": base, "whole": base.t()}

    job = w.job(tmp_path)
    w.save_new(job, make("cpu"))
    other = make("meta")
    w.load(job, other)
    assert w.bits(other) == w.bits(make("cpu"))
    assert other["again"] is other["base"]
    other["base"].zero_()
    assert not other["column"].any()
    assert not other["whole"].any()


def test_conversion_on_the_way(tmp_path):
    job = w.job(tmp_path)
    state = w.training(1, 2)
    w.save_new(job, state)
    other = on_meta()
    other["model"].to(torch.bfloat16)
    other["optimizer"].param_groups[0]["params"] = list(other["model"].parameters())
    w.load(job, other, options=LoadOptions(cast=True))
    assert torch.equal(other["model"].middle.weight, state["model"].middle.weight.bfloat16())
    assert other["optimizer"].state[other["model"].middle.weight]["exp_avg"].dtype == torch.bfloat16
    w.train(other, 1)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def refused(tmp_path, saved, live, match, **options):
    job = w.job(tmp_path)
    w.save_new(job, saved)
    with pytest.raises(StateError, match=match):
        w.load(job, live, options=LoadOptions(**options))


def test_what_the_checkpoint_does_not_have_is_said(tmp_path):
    with torch.device("meta"):
        model = Rotary()
    live = {"m": model}
    refused(tmp_path, {"m": Rotary()}, live, r"m/angles: is on the meta device, and no state dict has it")
    assert model.weight.is_meta
    report = w.load(w.job(tmp_path), live, options=LoadOptions(allow_missing=True)).report
    assert report.missing == ["m/angles"]
    assert model.weight.tolist() == [1, 1]
    assert model.angles.is_meta


@pytest.mark.parametrize("why", ["hook", "graph", "weak", "shape", "torn"])
def test_nothing_is_given_memory_unless_all_of_it_is(tmp_path, why):
    import weakref

    from slurm_resil.core import paths

    job = w.job(tmp_path)
    saved: dict = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    if why == "graph":
        saved["b"] = {"weight": torch.ones(2, 2)}
    manifest = w.save_new(job, saved)
    with torch.device("meta"):
        live = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 3 if why == "shape" else 2)}
    weight, keep = live["b"].weight, []
    if why == "hook":
        weight.register_hook(lambda grad: grad)
    elif why == "graph":
        live["b"] = {"weight": weight * 2}
    elif why == "weak":
        keep.append(weakref.ref(weight))
    elif why == "torn":
        w.flip(paths.slot(job, 0, 0), manifest.items[-1].offset)
    match = {"shape": r"b.weight: shape", "torn": "do not match their hash"}.get(
        why, "b/weight: is on the meta device and c"
    )
    with pytest.raises(DataError if why == "torn" else StateError, match=match):
        w.load(job, live)
    assert all(parameter.is_meta for parameter in live["a"].parameters())


def test_state_for_a_parameter_that_stays_on_meta_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        other = nn.Linear(2, 2)
    live = {"m": other, "o": torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.5)}
    refused(
        tmp_path,
        {"m": model, "o": optimizer},
        live,
        r"o/state/m/weight/momentum_buffer: belongs to a parameter on the meta device that is not restored",
        include="o",
    )


def test_a_device_of_ones_own(tmp_path):
    job = w.job(tmp_path)
    w.save_new(job, {"m": nn.Linear(2, 2)})
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    for name in ("gpu", "cuda" if not torch.cuda.is_available() else "xpu"):
        with pytest.raises(UsageError, match=f"device='{name}' is no device"):
            w.load(job, {"m": model}, options=LoadOptions(device=name))
    assert model.weight.is_meta
    w.load(job, {"m": model}, options=LoadOptions(device="cpu"))
    assert model.weight.device == torch.device("cpu")


def test_meta_tensors_are_not_saved(tmp_path):
    with pytest.raises(StateError, match=r"model/token.weight: a tensor on the meta device has no data"):
        flatten(on_meta())
