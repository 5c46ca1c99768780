"""Lazy saves: the state at the call is saved, whatever training does while it is copied."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import ckptworld as w
import pytest
import torch
from torch import nn

from slurm_resil.ckpt import copying, seal
from slurm_resil.ckpt.lazy import Hooks
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.ckpt.snapshot import Arena
from slurm_resil.ckpt.store import SlotStore
from slurm_resil.core.errors import DataError, StateError
from slurm_resil.format import draft
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch
State = dict[str, Any]


def a_state(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> State:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 7))  # pieces and batches
    return {
        "model": model,
        "optimizer": kind(model.parameters(), lr=0.01),
        "loose": torch.arange(50_000.0),  # that no optimizer has
        "frozen": nn.Parameter(torch.ones(40_000), requires_grad=False),
    }


def forward_and_backward(state: State) -> None:
    state["model"](torch.randn(16, 300)).square().sum().backward()
    state["loose"].add_(1)


def step(state: State) -> None:
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def a_store(job: str, state: State) -> SlotStore:
    return SlotStore(
        state,
        job_dir=job,
        run_dir=job,
        info=w.run_info(),
        rank=0,
        node="n",
        ranks_on_node=1,
        slots=3,
        private="error",
        options=LoadOptions(),
        helpers=(),
        shard=lambda iteration: ShardManifest.load(w.paths.manifest(job, iteration, 0)),
        shards=lambda iteration: pytest.fail("the number of ranks is as it was"),
        drained=lambda iteration: pytest.fail("nothing is drained"),
    )


def sealed(job: str, text: str) -> None:
    seal.seal(job, draft.Descriptions(job).complete(draft.read(job, text, "the draft")))


def restored(job: str, state: State, iteration: int) -> Any:
    into = copy.deepcopy(state)
    w.load(job, into, iteration=iteration)
    return w.bits(into)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 10_000)


KINDS = {
    "adamw": torch.optim.AdamW,
    "fused": lambda *a, **k: torch.optim.AdamW(*a, fused=True, **k),  # does not count the versions of its tensors
    "foreach": lambda *a, **k: torch.optim.SGD(*a, foreach=True, momentum=0.9, **k),
    "lbfgs": torch.optim.LBFGS,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["at once", "before the step", "in the step", "after the step"])
def test_the_state_at_the_call_is_saved(tmp_path, kind, when):
    """Whenever the thread gets to copy: before, beside or after what the training does."""
    job, state = w.job(tmp_path), a_state(KINDS[kind])
    store = a_store(job, state)

    def train(finish: Callable[[], str] | None = None) -> str | None:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(finish()))
        if when == "at once":
            thread.start()
        forward_and_backward(state)
        if when == "before the step":
            thread.start()
        if kind == "lbfgs":
            state["optimizer"].step(lambda: state["model"](torch.ones(16, 300)).square().sum())
        elif when == "in the step":
            handle = state["optimizer"].register_step_pre_hook(lambda *_: thread.start() or thread.join(10))
            state["optimizer"].step()
            handle.remove()
        else:
            step(state)
        if not thread.ident:
            thread.start()
        thread.join(10)
        return found[0]

    forward_and_backward(state)
    if kind != "lbfgs":
        step(state)
    for iteration in (1, 2, 3, 4):
        want = w.bits(state)
        text = train(store.start(iteration % 3, iteration))
        assert w.bits(state) != want
        sealed(job, text)
        assert restored(job, state, iteration) == want


def test_without_the_hook_it_would_not_be(tmp_path, monkeypatch):
    monkeypatch.setattr(Hooks, "_before_step", lambda *_: None)
    job, state = w.job(tmp_path), a_state(KINDS["fused"])
    store = a_store(job, state)
    want = w.bits(state)
    finish = store.start(0, 1)
    forward_and_backward(state)
    step(state)
    sealed(job, finish())
    assert restored(job, state, 1) != want


def test_what_appears_between_saves_is_saved(tmp_path):
    """The optimizer's tensors after the first step, a new parameter, one at another address, one of another shape."""
    job, state = w.job(tmp_path), a_state()
    store = a_store(job, state)

    def again(iteration: int) -> None:
        want = w.bits(state)
        finish = store.start(iteration % 3, iteration)
        forward_and_backward(state)
        step(state)
        sealed(job, finish())
        into = copy.deepcopy(state)
        if iteration == 1:
            into["optimizer"].state.clear()
        w.load(job, into, iteration=iteration)
        assert w.bits(into) == want

    again(1)
    again(2)
    model, optimizer = state["model"], state["optimizer"]
    model.append(nn.Linear(7, 3))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    again(3)
    again(4)
    model[0].weight.data = model[0].weight.data.clone()
    again(5)
    state["second"] = torch.optim.SGD([state["frozen"].requires_grad_()], lr=0.1)
    again(6)


def test_what_something_else_changes_fails_the_save(tmp_path):
    job, state = w.job(tmp_path), a_state()
    store = a_store(job, state)
    sealed(job, store.write(0, 1))
    finish = store.start(1, 2)
    with torch.no_grad():
        state["model"][2].weight.mul_(2)
    with pytest.raises(StateError, match=r"model.2\.weight was changed while it was being copied"):
        finish()
    torn = ShardManifest.load(w.paths.manifest(job, 1, 0))
    with pytest.raises(DataError, match=r"stale|torn|swapped"):
        seal.verify(job, ShardManifest(**{**vars(torn), "slot": "0-1.h5", "iteration": 2}))
    step(state)  # is not held back for ever
    want = w.bits(state)
    sealed(job, store.start(1, 3)())
    assert restored(job, state, 3) == want


@pytest.mark.parametrize("what", ["data", "double"])
def test_memory_that_a_tensor_gives_up_stays_until_it_is_copied(tmp_path, what):
    """Else the thread reads memory that is unmapped, and the training ends with a segmentation fault."""
    job, model = w.job(tmp_path), nn.Linear(1100, 1000)  # so large that its memory goes back to the system at once
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    store = a_store(job, state)
    sealed(job, store.start(0, 1)())
    for iteration in (2, 3):  # when the tensors themselves are what is copied, and when it is known what they are
        want, kept = w.bits(state), copy.deepcopy(state)
        finish = store.start(iteration % 3, iteration)
        old = model.weight.data_ptr()
        with torch.no_grad():
            if what == "data":
                model.weight.data = torch.ones(1000, 1100)
            else:
                model.double().float()
        model.weight.add(1)
        assert model.weight.data_ptr() != old
        sealed(job, finish())
        w.load(job, kept, iteration=iteration)
        assert w.bits(kept) == want


def test_only_optimizers_in_the_state_are_held_back(tmp_path):
    job, state = w.job(tmp_path), a_state()
    store = a_store(job, state)
    hooks = state["optimizer"]._optimizer_step_pre_hooks
    store.start(0, 1)()
    store.start(1, 2)()
    assert len(hooks) == 1
    other = state.pop("optimizer")
    want = w.bits(state)
    finish = store.start(2, 3)  # its parameters are nobody's now: copied at once
    assert len(hooks) == 0
    state["model"](torch.randn(4, 300)).sum().backward()
    other.step()
    sealed(job, finish())
    assert restored(job, state, 3) == want
    state["optimizer"] = other
    store.start(0, 4)()
    store.close()
    assert len(hooks) == 0


def test_an_error_of_a_copy_is_the_saves_not_the_trainings(tmp_path, monkeypatch):
    job, state = w.job(tmp_path), a_state()
    store = a_store(job, state)

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    finish = store.start(0, 1)
    monkeypatch.setattr(copying, "_memmove", refuse)
    forward_and_backward(state)
    step(state)
    with pytest.raises(RuntimeError, match="no"):
        finish()


def test_copies_that_wait_are_few_bytes_at_once(tmp_path):
    """Everything but parameters and what optimizers keep is copied at the call."""
    job, state = w.job(tmp_path), a_state()
    forward_and_backward(state)
    step(state)
    arena = Arena(job, 0, slots=2)
    flat = w.flatten(state)
    writing = arena.start(0, flat, iteration=1, run=w.run_info(), node="n", later=Hooks().watch(flat.optimizers))
    parameters = list(state["model"].parameters())
    kept = [one for entry in state["optimizer"].state.values() for one in entry.values()]
    assert writing.copies.later_bytes == sum(one.nbytes for one in [*parameters, *kept])
    writing.finish()
