"""async_save and load, alone and on real ranks: levels, order, damage, full storage, kills, exits, bounded memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent / "ckpt"))

import ckptworld as w
import torch

import slurm_resil as sr
from slurm_resil.ckpt import saved
from slurm_resil.cli.ckpt import ckpt
from slurm_resil.core.errors import (
    DataError,
    ResilError,
    SpaceError,
    StateError,
    TryAgainError,
    UsageError,
)
from slurm_resil.session import standalone

pytestmark = pytest.mark.torch

CHILD = str(Path(__file__).parent / "standalone_child.py")


@pytest.fixture(autouse=True)
def burst_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "bb"
    root.mkdir()
    monkeypatch.setenv("SLURM_RESIL_BB_ROOT", str(root))
    yield root
    if standalone._saver is not None:
        standalone._saver.close()
        standalone._forked()  # the next test has a burst buffer of its own
    assert list((root / "saves").glob("*")) == [] if (root / "saves").exists() else True


def numbers(value: float) -> dict[str, object]:
    return {"a": torch.full((1000,), float(value)), "n": int(value)}


def child(tmp_path: Path, *args: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SLURM_RESIL_FAULT": fault, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", CHILD, *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)


def test_the_state_at_the_call_is_saved_and_comes_back(tmp_path: Path) -> None:
    state = w.training(1, steps=3)
    before = w.bits(state)
    handle = sr.async_save(state, tmp_path / "out")
    assert handle.staged.done()
    w.train(state, 2)
    w.scramble(state)
    assert handle.local.result(60) is None
    assert handle.protected.result(60) is None
    assert handle.durable.result(60) == handle.path
    assert repr(handle) == f"<save of iteration 1 in {handle.path}: staged, local, protected, durable>"
    assert handle.complete()
    assert handle.protected.done()  # a loss of the node costs nothing now, and would have before
    other = w.training(2)
    assert sr.load(other, tmp_path / "out") == handle.iteration == 1
    assert w.bits(other) == before


def test_numbers_rise_and_old_checkpoints_go_once_there_are_newer_ones(tmp_path: Path) -> None:
    for value in range(1, 5):
        handle = sr.async_save(numbers(value), tmp_path / "out", iteration=40 if value == 2 else None)
        handle.durable.result(60)
        standalone._current()._background.settle(60)
        there = [save.iteration for save in saved.found(str(tmp_path / "out"))]
        assert there == [[1], [40, 1], [41, 40], [42, 41]][value - 1]
    state = numbers(0)
    assert sr.load(state, tmp_path / "out", iteration=41) == 41
    assert state["n"] == 3
    assert sr.load(state, handle.path) == 42
    assert state["n"] == 4
    with pytest.raises(DataError, match="iteration 40"):
        sr.load(state, tmp_path / "out", iteration=40)


@pytest.mark.parametrize("what", ["slots/0-0.h5", "manifests/*.json"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    for value in (1, 2):
        handle = sr.async_save(numbers(value), tmp_path / "out")
        handle.durable.result(60)
    (file,) = Path(handle.path).glob(what)
    at = saved.found(str(tmp_path / "out"))[0].manifests()[0].items[0].offset if "slots" in what else 300
    w.flip(str(file), at or 0)
    state = numbers(0)
    assert sr.load(state, tmp_path / "out") == 1
    assert (state["n"], float(state["a"][7])) == (1, 1.0)
    assert f"{os.path.basename(handle.path)} is bad" in caplog.text
    with pytest.raises(DataError, match="can be loaded"):
        sr.load(state, handle.path)


def test_what_cannot_be_stored_is_on_the_handle_and_training_goes_on(tmp_path: Path) -> None:
    handle = sr.async_save({"a": {"b": object()}}, tmp_path / "out")
    for future in (handle.staged, handle.local, handle.durable):
        with pytest.raises(StateError, match="rank 0, save of iteration 1: a/b: a builtins:object"):
            future.result(1)
    sr.async_save(numbers(5), tmp_path / "out").durable.result(60)
    state = {"a": torch.zeros(999), "n": 0}
    with pytest.raises(StateError, match="shape"):
        sr.load(state, tmp_path / "out")
    with pytest.raises(UsageError, match="keep=0"):
        sr.async_save(state, tmp_path / "out", keep=0)
    with pytest.raises(UsageError, match="backpressure"):
        sr.async_save(state, tmp_path / "out", backpressure="never")  # type: ignore[arg-type]


@contextlib.contextmanager
def slow_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Storage that waits until it is let go."""
    go, real = threading.Event(), saved.copy_slot
    monkeypatch.setattr(saved, "copy_slot", lambda *args: (go.wait(60), real(*args))[1])
    try:
        yield go
    finally:
        go.set()


def test_saves_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_storage(monkeypatch) as go:
        first, second = (sr.async_save(numbers(value), tmp_path / "out") for value in (1, 2))
        skipped = sr.async_save(numbers(3), tmp_path / "out")
        with pytest.raises(TryAgainError, match="rank 0, save of iteration 3: 2 saves are not durable"):
            skipped.durable.result(1)
        with pytest.raises(TryAgainError):
            sr.async_save(numbers(4), tmp_path / "out", backpressure="fail")
        timer = threading.Timer(0.2, go.set)
        timer.start()
        waited = sr.async_save(numbers(5), tmp_path / "out", backpressure="wait")
        timer.join()
        assert first.durable.done()
        for handle in (second, waited):
            handle.durable.result(60)
    state = numbers(0)
    assert sr.load(state, tmp_path / "out") == 5


def test_two_hundred_saves_take_the_memory_of_two(tmp_path: Path, burst_buffer: Path) -> None:
    state = {f"t{n}": torch.randn(1000, 25) for n in range(10)}

    def used() -> tuple[int, int]:
        slots = sum(path.stat().st_blocks * 512 for path in burst_buffer.rglob("*.h5"))
        own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return slots, own

    before = (0, 0)
    for index in range(200):
        path = tmp_path / "out" / f"{index % 3}"  # many programs have a directory for each checkpoint
        sr.async_save(state, path, backpressure="wait", keep=1)
        if index == 20:
            before = used()
    standalone._current()._background.settle(60)
    after = used()
    assert after[0] == before[0]
    assert after[1] - before[1] < 16 << 20
    assert len(list(burst_buffer.rglob("*.h5"))) == standalone.SLOTS


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 256 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", path], capture_output=True)
    if done.returncode:
        pytest.skip("may not mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_full_storage_is_an_error_of_the_handle_and_the_checkpoint_before_stands(small: Path) -> None:
    sr.async_save(numbers(1), small).durable.result(60)
    handle = sr.async_save({"a": torch.ones(100_000), "n": 1}, small)
    assert handle.local.result(60) is None
    with pytest.raises(SpaceError, match=r"rank 0, save of iteration 2: .* bytes free, a shard of 400000 bytes"):
        handle.durable.result(60)
    state = numbers(0)
    assert sr.load(state, small) == 1
    sr.async_save(numbers(3), small).durable.result(60)
    assert sr.load(state, small) == 3


def test_the_end_of_the_process_finishes_the_last_save(tmp_path: Path) -> None:
    done = child(tmp_path, "exit", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    state = numbers(0)
    assert sr.load(state, tmp_path / "out") == 3
    assert list((tmp_path / "bb" / "saves").glob("local-*.lock")) == []


def test_a_save_that_fails_at_the_end_is_reported(tmp_path: Path) -> None:
    done = child(tmp_path, "exit", str(tmp_path / "out"), fault="saved.copy:raise@3")
    assert "rank 0, save of iteration 3" in done.stderr
    assert sr.load(numbers(0), tmp_path / "out") == 2


@pytest.mark.parametrize("point", ["save.seal", "saved.copy", "saved.publish"])
def test_a_kill_leaves_the_checkpoint_before_and_what_is_left_in_the_burst_buffer_goes(
    tmp_path: Path, point: str
) -> None:
    done = child(tmp_path, "exit", str(tmp_path / "out"), fault=f"{point}:kill@3")
    assert done.returncode == -9, done.stderr
    state = numbers(0)
    assert sr.load(state, tmp_path / "out") == 2
    assert state["n"] == 2
    assert len(list((tmp_path / "bb" / "saves").glob("*.lock"))) == 1
    assert sr.async_save(numbers(9), tmp_path / "out").durable.result(60)
    assert len(list((tmp_path / "bb" / "saves").glob("*.lock"))) == 1
    assert len(list((tmp_path / "bb").rglob("slots"))) == 1
    assert sr.load(state, tmp_path / "out") == (3 if point == "save.seal" else 4)  # one that was begun has its number


def ranks(tmp_path: Path, world: int, *args: str, faults: dict[int, str] | None = None) -> list[str]:
    """Run all ranks; returns what they print."""
    meeting = tmp_path / f"meeting-{os.urandom(4).hex()}"
    started = []
    for rank in range(world):
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path), "SLURM_RESIL_FAULT": (faults or {}).get(rank, "")}
        argv = [sys.executable, "-W", "ignore", CHILD, *args, str(rank), str(world), str(meeting)]
        started.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        return [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()


def test_ranks_save_for_themselves_and_load_the_same_iteration(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    said = ranks(tmp_path, 2, "save", out, faults={1: "saved.copy:raise@3"})
    assert "durable 1 2 3" in said[0], said
    assert "durable 1 2 failed" in said[1], said
    assert "rank 1, save of iteration 3" in said[1]
    assert [save.complete for save in saved.found(out)] == [False, True, True]
    slot = Path(saved.found(out)[1].path, "slots", "1-0.h5")
    assert ["loaded 2" in text for text in ranks(tmp_path, 2, "load", out)] == [True, True]
    assert ["loaded 2" in text for text in ranks(tmp_path, 3, "load", out)] == [True] * 3
    items = saved.found(out)[1].manifests()[1].items
    w.flip(str(slot), next(item.offset for item in items if item.name == "mine") or 0)
    for text in ranks(tmp_path, 2, "load", out):  # only rank 1 reads what is bad there; both load the one before
        assert "loaded 1" in text
        assert "is bad: rank 1: " in text


def test_saves_are_looked_at_with_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESIL_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    handle = sr.async_save(numbers(1), tmp_path / "my saves")
    handle.durable.result(60)
    runner = CliRunner()
    said = runner.invoke(ckpt, ["ls", "--run-dir", str(tmp_path / "my saves")])
    assert said.exit_code == 0 and f"ls --job-dir '{handle.path}'" in said.output
    for command, word in ((["ls"], "1 of 1"), (["show", "1", "--tensor", "a"], "float32"), (["verify"], "1: sound")):
        said = runner.invoke(ckpt, [*command, "--job-dir", handle.path])
        assert said.exit_code == 0 and word in said.output, said.output
    said = runner.invoke(ckpt, ["ls", "--job-dir", str(tmp_path / "nowhere")])
    assert isinstance(said.exception, ResilError) and "--job-dir" in said.exception.mend
