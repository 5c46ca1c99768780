"""Throttle, hints, priority, lease."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_resil.comm.base import MAX_WRITE_BYTES
from slurm_resil.core.errors import ConfigError, ResilError, TryAgainError
from slurm_resil.core.throttle import Throttle
from slurm_resil.drain import hints, lease
from slurm_resil.drain.collective import Options


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


@pytest.mark.parametrize("size", [10, 100, 5000])
def test_throttle_keeps_the_rate(size):
    clock = FakeClock()
    throttle = Throttle(1000, 100, clock=clock)
    for _ in range(10_000 // size):
        throttle.take(size)
    assert clock.time - 100 == pytest.approx((10_000 - 100) / 1000, rel=0.02)
    assert max(clock.slept) <= Throttle.SLICE_S


def test_throttle_does_not_save_up_more_than_the_burst():
    clock = FakeClock()
    throttle = Throttle(1000, 100, clock=clock)
    clock.time += 1000
    throttle.take(600)
    assert clock.time - 1100 == pytest.approx(0.5)


def test_throttle_ends_when_asked():
    clock = FakeClock()
    throttle = Throttle(1, 1, clock=clock, stop=lambda: clock.time > 105)
    throttle.take(10**9)
    assert clock.time < 106


def test_no_throttle():
    clock = FakeClock()
    Throttle(None, 0, clock=clock).take(10**15)
    assert clock.slept == []
    with pytest.raises(ValueError, match="never ends"):
        Throttle(0, 1, clock=clock)


@pytest.mark.parametrize(
    "bad", [{"buffer_bytes": 100}, {"buffer_bytes": MAX_WRITE_BYTES + 1}, {"cap_bytes_s": 0}, {"cap_bytes_s": -5.0}]
)
def test_options_that_cannot_work(bad):
    with pytest.raises(ConfigError):
        Options(**bad)


MOUNTS = """22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:50 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:51 / /lustre\\040fs rw,noatime shared:5 - lustre mds@tcp:/x rw
32 31 0:52 / /lustre\\040fs/home rw - nfs4 server:/home rw
33 22 0:53 / /data rw - xfs /dev/vdb rw
34 22 0:54 / /data rw - gpfs data rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/somewhere", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/lustre fs/runs/1", "lustre"),
        ("/lustre fs/home/me", "nfs4"),
        ("/data/x", "gpfs"),
        ("/", "ext4"),
    ],
)
def test_file_system(path, kind):
    assert hints.file_system(path, MOUNTS) == kind


def test_file_system_of_here(tmp_path):
    assert hints.file_system("/proc") == "proc"
    assert hints.file_system(str(tmp_path)) != ""
    assert hints.file_system("/x", "nonsense\n") == ""


def test_hints(tmp_path):
    here = str(tmp_path)
    wide, narrow = {"runs": 10, "nbytes": 10 << 20}, {"runs": 1 << 20, "nbytes": 10 << 20}
    assert hints.choose(here, **wide) == {"romio_cb_write": "disable", "romio_ds_write": "disable"}
    assert hints.choose(here, **narrow)["romio_cb_write"] == "enable"
    site = {"romio_cb_write": "automatic", "cb_nodes": "4"}
    assert hints.choose(here, site=site, **wide) == {"romio_ds_write": "disable", **site}
    assert hints.choose(here, runs=0, nbytes=0)["romio_cb_write"] == "disable"


def test_priority_is_lowered():
    code = "from slurm_resil.core import priority; import os; priority.lower(); priority.lower(); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 10


def test_lease_is_exclusive_and_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    first = lease.Lease(str(tmp_path), 5, owner="job-9")
    begin = time.monotonic()
    with pytest.raises(TryAgainError, match=r"drained by process \d+ on .* \(job-9\)"):
        lease.Lease(str(tmp_path), 5, stale_s=30)
    assert time.monotonic() - begin < 10  # the heartbeat is seen, not waited out
    other = lease.Lease(str(tmp_path), 6)
    first.check()
    first.release()
    other.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EIO])
def test_lease_in_a_directory_that_refuses_names_the_directory_and_the_mend(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code), lease.path(str(tmp_path), 5))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ResilError) as caught:
        lease.Lease(str(tmp_path), 5)
    text = str(caught.value)
    assert f"iteration 5 into the run's directory {tmp_path}: {os.strerror(code)}; make it writable" in text
    assert ".lease" not in text


def test_lease_that_is_held_names_no_internal_file(tmp_path):
    held = lease.Lease(str(tmp_path), 5, owner="job-9")
    with pytest.raises(TryAgainError) as caught:
        lease.Lease(str(tmp_path), 5, stale_s=30)
    held.release()
    assert ".lease" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_lease_of_a_process_that_is_gone_is_taken_at_once(tmp_path):
    code = (
        "import os, sys; from slurm_resil.drain.lease import Lease; Lease(sys.argv[1], 5); sys.stdout.write('held');"
        " sys.stdout.flush(); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "held" and os.path.exists(lease.path(str(tmp_path), 5))
    begin = time.monotonic()
    lease.Lease(str(tmp_path), 5, stale_s=60).release()
    assert time.monotonic() - begin < 5
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "body", ['{"token": "t", "host": "elsewhere", "pid": 1, "boot": "b", "started": "1"}', "torn{", ""]
)
def test_lease_of_another_host_is_taken_only_when_it_is_silent(tmp_path, body):
    Path(lease.path(str(tmp_path), 5)).write_text(body)
    begin = time.monotonic()
    lease.Lease(str(tmp_path), 5, stale_s=0.6).release()
    assert time.monotonic() - begin >= 0.6
    assert os.listdir(tmp_path) == []


def test_lease_taken_over_is_noticed_and_left_alone(tmp_path):
    held = lease.Lease(str(tmp_path), 5)
    os.unlink(lease.path(str(tmp_path), 5))
    with pytest.raises(TryAgainError, match="somebody"):
        held.check()
    new = lease.Lease(str(tmp_path), 5)
    held.release()
    new.check()
    new.release()


def test_of_many_finders_one_takes_a_dead_lease(tmp_path):
    dead = {"token": "t", "host": "elsewhere", "pid": 1}
    Path(lease.path(str(tmp_path), 5)).write_text(json.dumps(dead))
    taken, refused = [], []

    def find() -> None:
        try:
            taken.append(lease.Lease(str(tmp_path), 5, stale_s=0.3))
        except TryAgainError:
            refused.append(1)

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sound = []
    for one in taken:
        try:
            one.check()
            sound.append(one)
        except TryAgainError:
            pass
    assert len(sound) == 1 and len(taken) + len(refused) == 8
    for one in taken:
        one.release()
    assert os.listdir(tmp_path) == []
