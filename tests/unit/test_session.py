"""A training script on one host, without Slurm and without a launcher: the whole way through a real agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slurm_resil as sr
from slurm_resil.agent.place import from_env
from slurm_resil.core.errors import UsageError
from slurm_resil.format.manifest import ShardManifest
from slurm_resil.session import Checkpointer

pytestmark = pytest.mark.torch

TRAIN = """
import json, os, sys, time
import torch
import slurm_resil as sr

options = json.loads(sys.argv[1])

def say(**fields):
    print(json.dumps(fields), flush=True)

torch.manual_seed(1)
model = torch.nn.Linear(options.get("width", 8), 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer, "seen": {"samples": 0}}
if options.get("odd") == "at once":
    state["odd"] = object()
with sr.Checkpointer.from_env(state, **options.get("arguments", {})) as checkpointer:
    start = checkpointer.restore()
    if options.get("odd") == "later":
        state["seen"]["odd"] = object()
    say(start=start, samples=state["seen"]["samples"], weight=model.weight.tolist())
    for number in range(start + 1, options["iterations"] + 1):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(number))).square().sum().backward()
        optimizer.step()
        state["seen"]["samples"] += 2
        time.sleep(options.get("pace", 0.0))
        if checkpointer.step(number):
            say(stopped=number)
            break
        say(done=number)
    saved = checkpointer.wait(timeout_s=20)
    say(saved=saved, error=checkpointer.last_error)
say(end=True, weight=model.weight.tolist())
"""


class Script:
    def __init__(self, work: Path, options: dict[str, Any], env: dict[str, str] | None = None) -> None:
        script = work / "train.py"
        script.write_text(TRAIN)
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=work,
            env={**os.environ, "SLURM_RESIL_BB_ROOT": str(work / "bb"), **(env or {})},
        )

    def end(self, timeout_s: float = 90.0) -> tuple[int, list[dict[str, Any]], str]:
        out, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, [json.loads(line) for line in out.splitlines()], errors


def said(lines: list[dict[str, Any]], key: str) -> list[Any]:
    return [line[key] for line in lines if key in line]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "bb").mkdir()
    return tmp_path


NAMED = {"SLURM_RESIL_RUN_ID": "a-run"}


def test_it_resumes_where_it_was(work: Path) -> None:
    whole, other = work / "whole", work / "other"
    for directory in (whole, other):
        (directory / "bb").mkdir(parents=True)
    options = {"arguments": {"every": 3}}
    code, lines, errors = Script(whole, {"iterations": 10, **options}, NAMED).end()
    assert code == 0, errors
    assert said(lines, "start") == [0]
    assert said(lines, "saved") == [True]
    reference = said(lines, "weight")[-1]
    code, lines, errors = Script(other, {"iterations": 7, **options}, NAMED).end()
    assert code == 0, errors
    code, lines, errors = Script(other, {"iterations": 10, **options}, NAMED).end()
    assert code == 0, errors
    assert said(lines, "start") == [6]
    assert said(lines, "samples") == [12]
    assert said(lines, "weight")[-1] == reference


def test_it_is_killed_and_resumes_from_what_was_sealed(work: Path) -> None:
    script = Script(work, {"iterations": 100_000, "pace": 0.01, "arguments": {"every": 5}}, NAMED)
    assert script.process.stdout is not None
    for line in script.process.stdout:
        if json.loads(line).get("done") == 23:
            script.process.kill()
            break
    script.process.communicate()
    code, lines, errors = Script(work, {"iterations": 30, "arguments": {"every": 5}}, NAMED).end()
    assert code == 0, errors
    assert said(lines, "start")[0] in (15, 20, 25)


def test_a_signal_of_the_grace_period_stops_it_at_a_safe_point(work: Path) -> None:
    script = Script(work, {"iterations": 100_000, "pace": 0.01}, NAMED)
    assert script.process.stdout is not None
    for line in script.process.stdout:
        if json.loads(line).get("done") == 5:
            break
    log = next((work / "bb").glob("job-*/agent.log"))
    agent = next(
        entry["pid"] for entry in map(json.loads, log.read_text().splitlines()) if entry["event"] == "agent_up"
    )
    os.kill(agent, signal.SIGTERM)
    code, lines, errors = script.end()
    assert code == 0, errors
    stopped = said(lines, "stopped")[0]
    assert said(lines, "saved") == [True]
    _, lines, _ = Script(work, {"iterations": stopped}, NAMED).end()
    assert said(lines, "start") == [stopped]


def test_no_agent_is_left_behind(work: Path) -> None:
    code, _, errors = Script(work, {"iterations": 3}, NAMED).end()
    assert code == 0, errors
    log = next((work / "bb").glob("job-*/agent.log"))
    deadline = time.monotonic() + 15
    while "agent_down" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    assert not list((work / "bb").glob("job-*/agent.sock"))


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 65)])
def test_a_state_that_cannot_be_saved(work: Path, strict: bool, code: int) -> None:
    options = {"iterations": 4, "odd": "later", "arguments": {"every": 2, "strict": strict}}
    got, lines, errors = Script(work, options, NAMED).end()
    assert got == code, errors
    assert "odd" in errors  # names the path in the state
    if not strict:
        assert said(lines, "done") == [1, 2, 3, 4]
        assert "odd" in said(lines, "error")[0]


def test_a_state_that_can_never_be_saved_is_refused_before_the_training(work: Path) -> None:
    got, lines, errors = Script(work, {"iterations": 4, "odd": "at once"}, NAMED).end()
    assert (got, lines) == (65, [])
    assert "odd: a builtins:object cannot be stored" in errors


@pytest.fixture
def alone(work: Path) -> Iterator[Callable[[], Checkpointer]]:
    """Makes checkpointers in this process."""
    env = {"SLURM_RESIL_BB_ROOT": str(work / "bb"), "SLURM_RESIL_PREFIX": str(work / "pfs"), **NAMED}
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(Checkpointer.from_env({"n": 1}, every=10, env=env, **more))


def test_iterations_are_whole_numbers_that_rise(alone: Callable[[], Checkpointer]) -> None:
    checkpointer = alone()
    assert checkpointer.restore() == 0
    checkpointer.step(np.int64(10))  # saved, too
    checkpointer.step(torch.tensor(20))
    checkpointer.step(20)
    assert checkpointer.last_error == ""
    assert checkpointer.wait(timeout_s=20)
    for odd in (21.0, "21", None, -1):
        with pytest.raises(UsageError, match=r"whole number|only rise"):
            checkpointer.step(odd)  # type: ignore[arg-type]
    for odd in (21.5, "21", None, -1, 0, 1 << 63):  # save(0) is no silent success
        with pytest.raises(UsageError, match="whole number"):
            checkpointer.save(odd)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"save\(19\) after iteration 20"):
        checkpointer.save(19)
    with pytest.raises(UsageError, match="within an epoch"):
        checkpointer.step(1)
    checkpointer.step(30)
    assert checkpointer.wait(timeout_s=20)


def test_a_word_for_private_state_that_does_not_exist_is_refused(alone: Callable[..., Checkpointer]) -> None:
    checkpointer = alone()
    with pytest.raises(UsageError, match="private='rank-mod' is none of error, fresh, rank_mod"):
        checkpointer.restore(private="rank-mod")  # type: ignore[arg-type]
    assert checkpointer.restore(private="rank_mod") == 0


@pytest.mark.parametrize("lazy", [False, True])
def test_a_metric_is_kept_with_the_next_save_and_with_no_other(
    work: Path, alone: Callable[..., Checkpointer], lazy: bool
) -> None:
    checkpointer = alone(lazy=lazy)
    checkpointer.restore()

    def saved(iteration: int) -> dict[str, float]:
        assert checkpointer.save(iteration) and checkpointer.wait(timeout_s=20)
        (path,) = work.glob(f"bb/job-*/manifests/{iteration:010d}-000000.json")
        found = ShardManifest.load(str(path)).metrics
        assert ("metrics" in json.loads(path.read_text())) is bool(found)  # older readers read what has none
        return found

    assert saved(1) == {}
    checkpointer.metric(loss=torch.tensor(0.5, requires_grad=True) * 1, accuracy=1)  # as training gives it
    checkpointer.metric(loss=np.float32(0.25), **{"eval/ppl": 3})
    assert saved(2) == {"loss": 0.25, "accuracy": 1.0, "eval/ppl": 3.0}
    assert saved(3) == {}
    checkpointer.metric(loss=float("nan"), accuracy=float("inf"), other=2.0)
    assert saved(4) == {"other": 2.0}
    for odd in ({"loss": "low"}, {"loss": None}, {"loss": torch.ones(2)}, {"a b": 1.0}, {"a:b": 1.0}, {"": 1.0}):
        with pytest.raises(UsageError, match=r"number|no name"):
            checkpointer.metric(**odd)  # type: ignore[arg-type]


def test_there_is_one_checkpointer_for_a_rank(alone: Callable[[], Checkpointer]) -> None:
    first = alone()
    with pytest.raises(UsageError, match="in this process already"):
        alone()
    first.restore()
    first.close()
    alone().restore()


def test_what_is_closed_saves_nothing_and_says_so_at_once(alone: Callable[[], Checkpointer]) -> None:
    checkpointer = alone()
    checkpointer.restore()
    assert checkpointer.save(1)
    checkpointer.close()
    assert checkpointer.wait(timeout_s=20)
    checkpointer.close()
    started = time.monotonic()
    for call in (
        lambda: checkpointer.save(2),
        lambda: checkpointer.step(10),
        checkpointer.prepare,
        checkpointer.restore,
    ):
        with pytest.raises(UsageError, match="is closed"):
            call()
    assert time.monotonic() - started < 5  # no wait for an agent that is not there
    assert alone().restore() == 1


def test_iterations_of_eleven_digits_are_found_again(alone: Callable[[], Checkpointer]) -> None:
    first = alone()
    first.restore()
    first.save(12_345_678_901)
    assert first.wait(timeout_s=20)
    first.close()
    assert alone().restore() == 12_345_678_901


@pytest.mark.parametrize("what", ["renamed", "of another run"])
def test_a_shard_is_not_what_its_name_says(work: Path, alone: Callable[[], Checkpointer], what: str) -> None:
    first = alone()
    first.restore()
    for iteration in (10, 20):
        first.save(iteration)
        assert first.wait(timeout_s=20)
    first.close()
    newest, older = sorted(work.glob("bb/job-*/manifests/*.json"), reverse=True)
    if what == "renamed":
        newest.rename(newest.with_name(newest.name.replace("0000000020", "0000000090")))
    else:
        manifest = ShardManifest.load(str(newest))
        ShardManifest(**{**vars(manifest), "run_id": "other"}).publish(str(newest), sync=False)
    assert alone().restore() == 10
    assert older.exists()


def test_a_checkpoint_of_another_model_ends_with_65_and_changes_nothing(work: Path) -> None:
    options = {"iterations": 2, "arguments": {"every": 2}}
    assert Script(work, options, NAMED).end()[0] == 0
    (work / "train.py").unlink()
    code, lines, errors = Script(work, options | {"width": 9}, NAMED).end()
    assert (code, lines) == (65, [])
    assert "(4, 8) in the checkpoint, (4, 9) in the state" in errors


def test_a_part_goes_into_a_model_without_memory(work: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = {"SLURM_RESIL_BB_ROOT": str(work / "bb"), "SLURM_RESIL_PREFIX": str(work / "pfs"), **NAMED}
    saved: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "seen": {"samples": 7}}
    with Checkpointer.from_env(saved, env=env) as first:
        first.restore()
        first.save(5)
        assert first.wait(timeout_s=20)
    with torch.device("meta"):
        state: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "new": torch.nn.Linear(2, 2)}
    with Checkpointer.from_env(state, env=env) as second:
        assert second.restore(options=sr.LoadOptions(include="model")) == 5
    assert torch.equal(state["model"].weight, saved["model"].weight)
    assert state["new"].weight.is_meta
    assert "left out as asked: new, seen" in caplog.text


def test_a_burst_buffer_that_cannot_be_used(work: Path) -> None:
    (work / "file").write_text("")
    code, _, errors = Script(work, {"iterations": 1}, {"SLURM_RESIL_BB_ROOT": str(work / "file" / "bb")}).end()
    assert code == 78
    words = errors.strip().splitlines()[-1]
    assert str(work / "file" / "bb") in words
    assert "SLURM_RESIL_BB_ROOT" in words


def test_arguments_are_checked() -> None:
    place = from_env({})

    def make(**arguments: Any) -> Callable[[], Checkpointer]:
        return lambda: Checkpointer(place, lambda *_: None, **arguments)  # type: ignore[arg-type, return-value] # not reached

    for arguments, words in (({"every": 0}, "every=0"), ({"backpressure": "hope"}, "skip, wait, fail")):
        with pytest.raises(UsageError, match=words):
            make(**arguments)()


def test_lazy_and_eager_saves_are_the_same(work: Path) -> None:
    weights = {}
    for lazy in (False, True):
        directory = work / str(lazy)
        (directory / "bb").mkdir(parents=True)
        options = {"arguments": {"every": 3, "lazy": lazy, "strict": True}}
        code, lines, errors = Script(directory, {"iterations": 7, **options}, NAMED).end()
        assert code == 0, errors
        assert said(lines, "saved") == [True]
        code, lines, errors = Script(directory, {"iterations": 10, **options}, NAMED).end()
        assert code == 0, errors
        assert said(lines, "start") == [6]
        weights[lazy] = (said(lines, "weight"), said(lines, "samples"))
    assert weights[True] == weights[False]


LAZY = """
import os, sys
import torch
import slurm_resil as sr

how = sys.argv[1]
model = torch.nn.Linear(2000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = sr.Checkpointer.from_env({"model": model, "optimizer": optimizer}, lazy=True, strict=how == "strict")
print("start", checkpointer.restore(), float(model.weight[0, 0].detach()), flush=True)
with torch.no_grad():
    model.weight.fill_(5)
checkpointer.save(1)
if how != "exit":  # at once, without a word to the checkpointer
    checkpointer.wait(timeout_s=20)
    from slurm_resil.ckpt import copying
    copying._memmove = lambda *_: model.weight.data.add_(0) is None or 1 / 0
    checkpointer.save(2)
    try:
        assert checkpointer.wait(timeout_s=20) is False
        for number in range(3, 6):
            assert checkpointer.step(number) is False
    except ZeroDivisionError:
        print("raised", flush=True)
    print("why", checkpointer.last_error, flush=True)
    checkpointer.close()
"""


def lazy(work: Path, how: str) -> list[str]:
    (work / "lazy.py").write_text(LAZY)
    env = {**os.environ, **NAMED, "SLURM_RESIL_BB_ROOT": str(work / "bb")}
    done = subprocess.run(
        [sys.executable, str(work / "lazy.py"), how], env=env, cwd=work, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_exit_right_after_a_lazy_save_completes_it(work: Path) -> None:
    lazy(work, "exit")
    assert lazy(work, "exit")[0] == "start 1 5.0"


def test_a_lazy_save_that_fails_is_reported(work: Path) -> None:
    for how in ("report", "strict"):
        (work / how / "bb").mkdir(parents=True)
    said_ = lazy(work / "report", "report")
    assert said_[1].startswith("why save of iteration 2 failed: ZeroDivisionError") and len(said_) == 2
    assert lazy(work / "strict", "strict")[1:] == ["raised", said_[1]]


PREPARED = """
import os, sys, time
import torch
import slurm_resil as sr

model = torch.nn.Linear(300, 100)
optimizer = torch.optim.AdamW(model.parameters())
place = lambda: os.path.join(sys.argv[1], *os.listdir(sys.argv[1]), "slots")
slots = lambda: sorted(os.listdir(place())) if os.path.isdir(place()) else []
inodes = lambda: {name: os.stat(os.path.join(place(), name)).st_ino for name in slots()}
with sr.Checkpointer.from_env({"model": model, "optimizer": optimizer}, every=1000, strict=True) as checkpointer:
    start = checkpointer.restore()
    before = inodes()
    for number in range(start + 1, start + 3):
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        checkpointer.step(number)
    if sys.argv[2] == "call":
        assert checkpointer.prepare(timeout_s=30)
    limit = time.monotonic() + 30
    while len(slots()) < 3 or any(name.endswith(".tmp") for name in slots()):
        assert time.monotonic() < limit, slots()
        time.sleep(0.01)
    made = inodes()
    assert not before or made == before
    for number in range(start + 3, start + 9):
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        assert checkpointer.save(number) and checkpointer.wait(timeout_s=30)
    assert inodes() == made, (inodes(), made)
print(start)
"""


@pytest.mark.parametrize("how", ["call", "first iteration"])
def test_slots_are_laid_out_by_the_agent_before_the_first_save(work: Path, how: str) -> None:
    """And the next process takes them over."""
    (work / "prepared.py").write_text(PREPARED)
    env = {**os.environ, **NAMED, "SLURM_RESIL_BB_ROOT": str(work / "bb")}
    for start in ("0", "8"):
        done = subprocess.run(
            [sys.executable, str(work / "prepared.py"), str(work / "bb"), how],
            env=env,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout.strip()) == (0, start), done.stderr
