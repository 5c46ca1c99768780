"""Copies from a device, through the code that CUDA uses, over a stand-in that shows every wrong order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import ckptworld as w
import pytest
import torch
from fakedevice import StandIn

from slurm_resil.ckpt import device, seal
from slurm_resil.ckpt.device import DeviceLane, Lanes
from slurm_resil.ckpt.flatten import flatten
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.core.errors import DataError

pytestmark = pytest.mark.torch


@pytest.fixture(params=[False, True], ids=["registered", "staging"])
def standin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(device, "STAGING_BYTES", 4096)  # several pieces
    made = StandIn(refuses=request.param)
    yield made
    made.close()


def a_state(standin: StandIn) -> dict[str, torch.Tensor]:
    tensors = {
        "a": torch.arange(5000, dtype=torch.float32),
        "half": torch.arange(300).bfloat16(),
        "one": torch.tensor(3.0),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "big turned": torch.arange(4000.0).reshape(2, 2000).t(),
        "empty": torch.empty(0),
        "one of a step": torch.arange(4.0)[::4],  # contiguous, and yet with a stride of 4
        "a column of one": torch.arange(8.0).bfloat16().reshape(4, 2)[:1, :1],
    }
    return {name: standin.mark(tensor) for name, tensor in tensors.items()}


def overwrite(standin: StandIn, state: dict[str, torch.Tensor]) -> None:
    """What an optimizer does: queued, after what was queued before."""
    for tensor in state.values():
        standin.run(lambda tensor=tensor: tensor.fill_(7))


def restored(job: str, iteration: int) -> dict[str, torch.Tensor]:
    into = {name: torch.zeros_like(tensor) for name, tensor in a_state(StandIn()).items()}
    w.load(job, into, iteration=iteration)
    return into


def test_a_save_comes_after_what_was_queued_and_before_what_is_queued_next(tmp_path, standin):
    job, state = w.job(tmp_path), a_state(standin)
    arena = Arena(job, 0, slots=2, lanes=Lanes(standin))
    want = w.bits(a_state(StandIn()))
    for iteration in (1, 2, 3):
        state["a"].fill_(-1)
        standin.run(lambda: state["a"].copy_(torch.arange(5000.0)))  # a pass whose result is to be saved
        draft = arena.write(iteration % 2, flatten(state), iteration=iteration, run=w.run_info(), node="n")
        seal.seal(job, draft)
        assert w.bits(restored(job, iteration)) == want
    assert len(standin.streams) == 2  # one beside the training's, used again and again


def test_memory_is_registered_once_and_taken_back(tmp_path, standin):
    job, state = w.job(tmp_path), a_state(standin)
    arena = Arena(job, 0, slots=2, lanes=Lanes(standin))
    for iteration in range(1, 9):
        arena.write(iteration % 2, flatten(state), iteration=iteration, run=w.run_info(), node="n")
    assert standin.registrations == [int(standin.refuses)] * 2
    state["new"] = standin.mark(torch.ones(9))  # both slots are laid out anew, perhaps at the same addresses
    for iteration in (9, 10):
        arena.write(iteration % 2, flatten(state), iteration=iteration, run=w.run_info(), node="n")
    assert standin.registrations == [int(standin.refuses)] * 4
    arena.close()
    assert standin.registered == {}


def lazily(arena: Arena, state: dict[str, torch.Tensor], standin: StandIn) -> list[object]:
    """A lazy save, and an optimizer that comes at once; what the save became."""
    found: list[object] = []
    stays = {id(tensor) for name, tensor in state.items() if name != "one"}  # "one" changes in a forward pass
    writing = arena.start(
        0, flatten(state), iteration=1, run=w.run_info(), node="n", later=lambda tensor: id(tensor) in stays
    )
    standin.run(lambda: state["one"].fill_(9))
    thread = threading.Thread(target=lambda: found.append(writing.finish()))
    thread.start()
    writing.copies.release()
    overwrite(standin, state)
    thread.join(10)
    standin.training.synchronize()
    return found


def test_a_lazy_save_is_of_the_state_at_the_call(tmp_path, standin):
    job, state = w.job(tmp_path), a_state(standin)
    (draft,) = lazily(Arena(job, 0, slots=2, lanes=Lanes(standin)), state, standin)
    seal.seal(job, draft)
    assert w.bits(restored(job, 1)) == w.bits(a_state(StandIn()))
    assert state["a"][0] == 7


def test_the_training_does_not_wait_for_the_device_in_a_lazy_save(tmp_path):
    """The device is kept busy for ever: begin and release come back, only finish() waits."""
    standin = StandIn()
    job, state = w.job(tmp_path), a_state(standin)
    arena = Arena(job, 0, slots=2, lanes=Lanes(standin))
    arena.prepare(flatten(state))
    hold = threading.Event()
    standin.run(lambda: hold.wait(10))
    writing = arena.start(0, flatten(state), iteration=1, run=w.run_info(), node="n", later=lambda _: True)
    thread = threading.Thread(target=writing.finish)
    thread.start()
    writing.copies.release()
    thread.join(0.2)
    assert thread.is_alive() and not hold.is_set()
    hold.set()
    thread.join(10)
    assert not thread.is_alive()
    standin.close()


@pytest.mark.parametrize("broken", ["start", "fence"])
def test_without_an_order_it_is_seen(tmp_path, monkeypatch, broken):
    """That the stand-in shows each fault which the tests above exclude."""
    standin = StandIn(late="training" if broken == "start" else "lanes")
    monkeypatch.setattr(DeviceLane, broken, lambda self: None)
    job, state = w.job(tmp_path), a_state(standin)
    arena = Arena(job, 0, slots=2, lanes=Lanes(standin))
    if broken == "start":
        state["a"].fill_(-1)
        standin.run(lambda: state["a"].copy_(torch.arange(5000.0)))
    (draft,) = lazily(arena, state, standin)
    seal.seal(job, draft)
    assert w.bits(restored(job, 1)) != w.bits(a_state(StandIn()))
    standin.close()


def test_damage_by_a_late_copy_is_found(tmp_path, monkeypatch):
    standin = StandIn(late="lanes")
    monkeypatch.setattr(DeviceLane, "finish", lambda self: None)
    job, state = w.job(tmp_path), a_state(standin)
    draft = Arena(job, 0, slots=2, lanes=Lanes(standin)).write(
        0, flatten(state), iteration=1, run=w.run_info(), node="n"
    )
    seal.seal(job, draft)
    for stream in standin.streams:
        stream.synchronize()
    with pytest.raises(DataError, match="do not match their hash"):
        restored(job, 1)
    standin.close()
