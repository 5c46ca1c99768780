"""The command over real MPI: one process per "node", each with its own burst buffer directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shardworld import ITERATION, Local, World, build, mpiexec

from slurm_resil.core import paths
from slurm_resil.drain import lease
from slurm_resil.drain.orders import Orders

pytestmark = pytest.mark.mpi

DEADLINE_S = 60.0


def argv(world: World, *options: str, iteration: str = str(ITERATION), run_dir: str | None = None) -> list[str]:
    program = [sys.executable, "-m", "slurm_resil", "mover", "drain"]
    line = [mpiexec()]
    for node in range(world.nodes):
        line += [":"] if node else []
        line += ["-n", "1", *program, "--run-dir", run_dir or world.run_dir, "--job-dir", world.job_dir(node)]
        line += ["--iteration", iteration, "--json", *options]
    return line


def mover(world: World, *options: str, **kwargs: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(world, *options, **kwargs), capture_output=True, text=True, timeout=DEADLINE_S)


@contextlib.contextmanager
def started(world: World, *options: str, fault: str = "") -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "SLURM_RESIL_FAULT": fault}
    process = subprocess.Popen(
        argv(world, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        yield process
    finally:
        for pid in ranks_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def ranks_of(pid: int) -> list[int]:
    """Processes of the command below mpiexec."""
    found = []
    for child in children(pid):
        found += ranks_of(child)
        with contextlib.suppress(OSError):
            if b"\0mover\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return [one for one in found if not is_launcher(one)]


def is_launcher(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"hydra" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return False


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end, "did not come to that in time"
        time.sleep(0.02)


def stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def last(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 1), (4, 2), (3, 3)])
def test_drains_over_mpi_bit_for_bit(tmp_path, ranks, per_node):
    world = build(tmp_path, ranks=ranks, per_node=per_node, scale=20)
    world.seal()
    done = mover(world, "--buffer", "16384")
    assert done.returncode == 0, done.stderr
    manifest = world.check()
    line = last(done.stdout)
    assert line["event"] == "drained" and line["iteration"] == ITERATION and not line["already"]
    assert line["bytes"] == sum(line["written_bytes"]) == sum(manifest.written_bytes)
    assert len(line["written_bytes"]) == world.nodes and line["seconds"] > 0
    assert max(line["written_bytes"]) <= 1.5 * line["bytes"] / world.nodes
    assert all(os.path.exists(paths.durable(world.job_dir(node), ITERATION)) for node in range(world.nodes))
    again = mover(world, iteration="newest")
    assert again.returncode == 0 and last(again.stdout)["already"] is True


@pytest.mark.parametrize("hint", ["romio_cb_write=enable", "romio_cb_write=disable"])
def test_hints_do_not_change_the_file(tmp_path, hint):
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    done = mover(world, "--hint", hint)
    assert done.returncode == 0, done.stderr
    world.check()


def test_cap(tmp_path):
    world = build(tmp_path, ranks=2, scale=40)
    world.seal()
    done = mover(world, "--cap", "100000")
    assert done.returncode == 0, done.stderr
    line = last(done.stdout)
    assert line["costs_s"]["write"] > 0.8 * (line["bytes"] - 100_000) / 100_000 > 0.5
    world.check()


def test_missing_shards_end_every_rank_with_75_and_their_names(tmp_path):
    world = build(tmp_path, ranks=3)
    world.seal()
    os.unlink(paths.manifest(world.job_dir(1), ITERATION, 1))
    done = mover(world)
    assert done.returncode == 75
    assert done.stderr.count("is not sealed by rank 1 of 3") == 1
    assert last(done.stdout)["retryable"] is True
    assert world.published() == [] and world.leftovers() == []


def test_flipped_and_truncated_shards_end_with_65(tmp_path):
    """R1."""
    world = build(tmp_path, ranks=2)
    world.seal()
    world.flip(1, "model/rows")
    done = mover(world)
    assert done.returncode == 65 and "model/rows" in done.stderr and "rank 1 on node1" in done.stderr
    os.truncate(world.slot(0), 4200)
    done = mover(world)
    assert done.returncode == 65 and "rank 0 on node0 is truncated" in done.stderr
    assert world.published() == [] and world.leftovers() == []


def test_missing_run_directory(tmp_path):
    """N12."""
    world = build(tmp_path, ranks=2)
    world.seal()
    done = mover(world, run_dir=str(tmp_path / "no" / "run-7"))
    assert done.returncode == 78 and "run-7 does not exist" in done.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_mover_publishes_nothing_and_the_next_one_does(tmp_path, victim):
    """S12: what the killed one left is replaced."""
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    with started(world, "--buffer", "4096", fault="drain.round:stop@3") as process:
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        assert world.leftovers() != [] and world.published() == []
        os.kill(sorted(ranks_of(process.pid))[victim], signal.SIGKILL)
        for pid in ranks_of(process.pid):
            os.kill(pid, signal.SIGCONT)
        assert process.wait(DEADLINE_S) != 0
        until(lambda: not ranks_of(process.pid))
    assert world.published() == []
    done = mover(world)
    assert done.returncode == 0, done.stderr
    world.check()


def test_killed_launcher(tmp_path):
    """S2: renamed, but without its manifest it does not count."""
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    with started(world, fault="drain.publish:stop") as process:
        until(lambda: any(stopped(pid) for pid in ranks_of(process.pid)))
        members = ranks_of(process.pid)
        for pid in members:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait(DEADLINE_S)
    assert not os.path.exists(paths.drained_manifest(world.run_dir, ITERATION))
    assert mover(world).returncode == 0
    world.check()


def test_sigterm_publishes_nothing_and_ends_with_75(tmp_path):
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    with started(world, "--buffer", "4096", fault="drain.round:stop@3") as process:
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        members = ranks_of(process.pid)
        os.kill(members[1], signal.SIGTERM)  # one is enough: they agree
        for pid in members:
            os.kill(pid, signal.SIGCONT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, err
    assert "stopped as asked" in err
    assert (last(out)["event"], last(out)["kind"]) == ("failed", "StoppedError")  # the launcher counts it as no failure
    assert world.published() == []
    again = mover(world)
    assert again.returncode == 0, again.stderr
    line = last(again.stdout)
    assert 0 < sum(line["written_bytes"]) < line["bytes"]  # the two rounds before the signal are there
    world.check()


def test_sigterm_to_a_rank_that_waits_for_a_dead_one(tmp_path):
    """As srun does it: the others of a step get SIGTERM when one was killed, and SIGKILL only after KillWait."""
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    with started(world, "--buffer", "4096", fault="drain.round:stop@3") as process:
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        first = next(
            pid for pid in ranks_of(process.pid) if world.job_dir(0) in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(first, signal.SIGCONT)  # it now waits inside MPI for the other one
        os.kill(first, signal.SIGTERM)
        until(lambda: first not in ranks_of(process.pid))
        assert not os.path.exists(lease.path(world.run_dir, ITERATION)) and world.published() == []
    assert mover(world).returncode == 0
    world.check()


def test_sigterm_can_be_told_to_mean_nothing(tmp_path):
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    with started(world, "--on-term", "finish", fault="drain.round:stop@1") as process:
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            for pid in ranks_of(process.pid):
                os.kill(pid, number)
        assert process.wait(DEADLINE_S) == 0
    world.check()


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.full)])
def test_storage_that_hangs_is_told_and_waited_for(tmp_path, seconds):
    """The write of one of two movers hangs: the other one cannot tell, and nothing is published before it is whole."""
    world = build(tmp_path, ranks=2, scale=20)
    world.seal()
    begun = time.monotonic()
    with started(world, fault=f"drain.write:hang{seconds}") as process:
        while line := process.stdout.readline():
            if json.loads(line)["event"] == "hangs":
                break
            assert world.published() == []
        told = json.loads(line)
        assert (told["event"], told["doing"].split()[0]) == ("hangs", "writing") and told["node"]
        assert 4 < told["seconds"] < 8 and world.published() == []
        out, _ = process.communicate(timeout=DEADLINE_S + seconds)
        assert process.returncode == 0 and time.monotonic() - begun > seconds
    lines = [json.loads(text) for text in out.splitlines()]
    (went_on,) = [one for one in lines if one["event"] == "went_on" and one["node"] == told["node"]][:1]
    assert went_on["seconds"] >= seconds - 1
    world.check()


def test_an_order_lifts_the_cap_and_sigterm_of_a_mover(tmp_path):
    world = build(tmp_path, ranks=2, scale=40)
    world.seal()
    with started(world, "--cap", "20000") as process:
        while json.loads(line := process.stdout.readline())["event"] != "progress":
            pass
        Orders(iteration=ITERATION, finish=True).write(world.run_dir)
        while json.loads(line)["event"] != "ordered":
            line = process.stdout.readline()
        assert json.loads(line) == {"event": "ordered", "cap_bytes_s": None, "finish": True}
        for pid in ranks_of(process.pid):
            os.kill(pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=20)  # at the cap it would take a minute
        assert process.returncode == 0 and last(out)["event"] == "drained"
    world.check()


def test_two_movers_at_once(tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    with started(world, fault="drain.round:stop") as process:
        until(lambda: os.path.exists(lease.path(world.run_dir, ITERATION)))
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        members = ranks_of(process.pid)
        owner = json.loads(Path(lease.path(world.run_dir, ITERATION)).read_text())
        second = subprocess.Popen(argv(world), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: beat(world, second))
        _, err = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == 75 and f"being drained by process {owner['pid']}" in err
        for pid in members:
            os.kill(pid, signal.SIGCONT)
        assert process.wait(DEADLINE_S) == 0
    world.check()


def beat(world: World, process: subprocess.Popen[str]) -> bool:
    """Beat for the owner that is stopped, until the other one has seen it."""
    os.utime(lease.path(world.run_dir, ITERATION))
    return process.poll() is not None


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "pfs"
    place.mkdir()
    mount = shutil.which("mount") or "/bin/mount"
    subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run([shutil.which("umount") or "/bin/umount", str(place)], check=True)


def test_too_small_a_file_system(small, tmp_path):
    world = build(tmp_path, ranks=2, scale=1200)
    world.seal()
    done = mover(world, "--retry", "1")
    assert '"retry"' in done.stdout
    assert done.returncode == 1
    assert "bytes free, the checkpoint needs" in done.stderr and world.run_dir in done.stderr
    assert os.listdir(world.run_dir) == []


def test_a_file_system_that_fills_up_meanwhile(small, tmp_path):
    """S7, and S12: what is published is whole or not there; the next drain works."""
    world = build(tmp_path, ranks=2, scale=400)
    world.seal()
    kept = small / "kept"
    kept.write_bytes(b"of before")
    with started(world, "--buffer", "65536", "--retry", "1", fault="drain.round:stop@3") as process:
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        with contextlib.suppress(OSError), open(small / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(65536))
        for pid in ranks_of(process.pid):
            os.kill(pid, signal.SIGCONT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "bytes free, the checkpoint needs" in err, out + err
    assert '"retry"' in out and "No space left on device" in out
    assert world.published() == [] and kept.read_bytes() == b"of before"
    (small / "filler").unlink()
    assert mover(world).returncode == 0
    world.check()


def test_a_read_only_file_system(small, tmp_path):
    world = build(tmp_path, ranks=2)
    world.seal()
    subprocess.run([shutil.which("mount") or "/bin/mount", "-o", "remount,ro", str(small)], check=True)
    done = mover(world)
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr and world.run_dir in done.stderr


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_killed_at_nine_tenths_the_next_mover_writes_the_last_tenth(tmp_path, victims):
    """Two movers with journals as they are in use; the goal is 0.15 of all bytes."""
    world = build(tmp_path, ranks=2, scale=10)
    for rank in range(2):
        data = np.random.default_rng(rank).integers(0, 255, 640 << 17, np.uint8)
        world.states[rank]["big"] = Local(data, "private")
        world.expected[f"ranks/{rank}/big"] = data
    world.seal()
    with started(world, fault="drain.round:stop@73") as process:  # of 81
        until(lambda: len([pid for pid in ranks_of(process.pid) if stopped(pid)]) == 2)
        members = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in ranks_of(process.pid)}
        for pid, line in members.items():
            if any(world.job_dir(victim) in line for victim in victims):
                os.kill(pid, signal.SIGKILL)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert process.wait(DEADLINE_S) != 0
        until(lambda: not ranks_of(process.pid))
    assert world.published() == []
    done = mover(world)
    assert done.returncode == 0, done.stderr
    line = last(done.stdout)
    print("written again:", sum(line["written_bytes"]) / line["bytes"])
    assert sum(line["written_bytes"]) <= 0.15 * line["bytes"]
    assert '"resumed"' in done.stdout
    world.check()


@pytest.mark.full
def test_a_tensor_beyond_32_bit_counts(tmp_path):
    """More than 2^31 bytes written by one mover, in rounds of 1 GiB."""
    world = World(root=tmp_path, ranks=1, per_node=1, states=[{}])
    world.states[0]["big"] = Local(np.arange((1 << 31) // 8 + 1000, dtype=np.int64))
    world.expected["state/big"] = world.states[0]["big"].data
    world.seal()
    done = subprocess.run(argv(world, "--buffer", str(1 << 30)), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert last(done.stdout)["written_bytes"][0] > 1 << 31
    world.check()
