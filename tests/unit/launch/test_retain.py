"""Deleting old checkpoints: what goes, what never goes, and that being killed between two deletions does no harm."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stock import drained, left

from slurm_resil.catalog import RunCatalog
from slurm_resil.core import faults, fsio, paths, pins
from slurm_resil.core.errors import ServiceError
from slurm_resil.core.retention import Retention, parse_best
from slurm_resil.drain.lease import Lease
from slurm_resil.drain.lease import path as lease_path
from slurm_resil.launch.retain import EVIDENCE_KEPT, Pruner

ONE = Retention(keep_last=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    drained(tmp_path / "r", 10, 20, 30, 40)
    return tmp_path / "r"


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run))


def test_it_deletes_what_no_rule_keeps(run):
    (run / "events.jsonl").touch()
    done = Pruner(str(run), Retention(keep_last=1, every_iterations=20)).prune()
    assert (done.deleted, done.nbytes, done.left, done.failed) == ([10, 30], 200, {}, {})
    assert names(run) == [
        *("ckpt-0000000020.h5", "ckpt-0000000020.json", "ckpt-0000000040.h5", "ckpt-0000000040.json", "events.jsonl")
    ]


def test_without_rules_nothing_goes(run):
    os.unlink(paths.drained_manifest(str(run), 10))
    Path(paths.drained_part(str(run), 20)).touch()
    before = names(run)
    assert Pruner(str(run), Retention()).prune().deleted == []
    assert names(run) == before


def test_the_best_stays(run):
    drained(run, 20, loss=0.1)
    drained(run, 30, loss=0.2)
    assert Pruner(str(run), Retention(best=parse_best("loss:min"))).prune().deleted == [10, 30]


def test_one_that_is_not_whole_is_no_successor(run):
    os.truncate(paths.drained(str(run), 40), 99)
    done = Pruner(str(run), ONE).prune()
    assert done.deleted == [10, 20]
    assert left(run) == [30, 40]  # 40 is there as evidence
    os.unlink(paths.drained(str(run), 30))
    drained(run, 20)
    assert Pruner(str(run), ONE).prune().deleted == []  # two that are not whole make no successor either
    assert 20 in left(run)


def test_what_is_newer_than_the_training_neither_counts_nor_goes(run):
    assert Pruner(str(run), ONE).prune(newest=30).deleted == [10, 20]
    assert left(run) == [30, 40]
    assert Pruner(str(run), ONE).prune(newest=5).deleted == []


def test_other_runs_are_left_alone(run):
    drained(run, 10, run_id="other")
    os.replace(paths.drained_manifest(str(run), 20), paths.drained_manifest(str(run), 15))
    done = Pruner(str(run), ONE).prune()
    assert done.deleted == [30]
    assert {"ckpt-0000000010.h5", "ckpt-0000000010.json", "ckpt-0000000015.json"} <= set(names(run))


def test_a_manifest_of_a_format_that_is_not_known_here_is_left_alone(run):
    raw = fsio.read_json(paths.drained_manifest(str(run), 10))
    fsio.write_json(paths.drained_manifest(str(run), 10), raw | {"version": 99}, sync=False)
    assert Pruner(str(run), ONE).prune().deleted == [20, 30]
    assert os.path.exists(paths.drained(str(run), 10))


def test_what_a_person_keeps_stays_and_its_mark_goes_with_it(run):
    Path(paths.drained_kept(str(run), 10)).touch()
    pruner = Pruner(str(run), ONE)
    assert pruner.prune().deleted == [20, 30]
    os.unlink(paths.drained_kept(str(run), 10))
    assert pruner.prune().deleted == [10]
    assert names(run) == ["ckpt-0000000040.h5", "ckpt-0000000040.json"]


@pytest.mark.parametrize("broken", ["list", "read", "stat"])
def test_what_cannot_be_read_is_unknown_and_unknown_deletes_nothing(run, monkeypatch, broken):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    pruner, before = Pruner(str(run), ONE), names(run)
    with monkeypatch.context() as patch:
        real = os.stat
        if broken == "list":
            patch.setattr(os, "listdir", refuse)
        elif broken == "read":
            patch.setattr(fsio, "read_bytes", refuse)
        else:
            patch.setattr(os, "stat", lambda path, **more: refuse() if "20.h5" in str(path) else real(path, **more))
        with pytest.raises(ServiceError, match="Input/output error"):
            pruner.prune()
    assert names(run) == before
    assert pruner.prune().deleted == [10, 20, 30]


def test_a_run_that_is_not_there(tmp_path):
    with pytest.raises(ServiceError, match="No such file"):
        Pruner(str(tmp_path / "none"), ONE).prune()


def test_what_somebody_reads_stays_until_that_ends(run):
    fd = os.open(paths.drained(str(run), 20), os.O_RDONLY)
    pins.share(fd)
    pruner = Pruner(str(run), ONE)
    done = pruner.prune()
    assert (done.deleted, done.left) == ([10, 30], {20: "somebody reads it"})
    os.close(fd)
    assert pruner.prune().deleted == [20]


def test_what_another_process_reads_stays(run):
    code = "import os, sys; from slurm_resil.core import pins; pins.share(os.open(sys.argv[1], os.O_RDONLY))"
    code += "; print(1, flush=True); input()"
    argv = [sys.executable, "-c", code, paths.drained(str(run), 20)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert Pruner(str(run), ONE).prune().left == {20: "somebody reads it"}
        reader.communicate(b"\n")
    assert left(run) == [20, 40]


def test_where_there_are_no_locks_it_deletes_all_the_same(run, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    assert Pruner(str(run), ONE).prune().deleted == [10, 20, 30]


def test_an_iteration_that_is_being_drained_is_left_alone(run):
    os.unlink(paths.drained_manifest(str(run), 10))  # as between its rename and its publication
    lease = Lease(str(run), 10)
    done = Pruner(str(run), ONE).prune()
    lease.release()
    assert done.deleted == [20, 30] and "is being drained" in done.left[10]
    assert os.path.exists(paths.drained(str(run), 10))


def test_a_full_file_system_is_freed_though_there_is_no_room_for_a_lease(run, monkeypatch):
    real = os.open

    def full(path, flags, *more, **options):
        if ".lease." in str(path):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", path)
        return real(path, flags, *more, **options)

    Path(lease_path(str(run), 20)).touch()
    monkeypatch.setattr(os, "open", full)
    done = Pruner(str(run), ONE).prune()
    assert done.deleted == [10, 30]
    assert "quota" in done.failed[20]  # somebody may be at it: nobody can tell


def test_one_that_cannot_be_deleted_keeps_nobody_else(run, monkeypatch):
    real = os.unlink

    def unlink(path, **more):
        if str(path).endswith("20.json"):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    done = Pruner(str(run), ONE).prune()
    assert done.deleted == [10, 30]
    assert "Operation not permitted" in done.failed[20] and "ckpt-0000000020.json" in done.failed[20]


def test_leftovers_older_than_the_newest_go_and_evidence_is_bounded(run):
    os.unlink(paths.drained_manifest(str(run), 10))  # published never, or deleted by half
    for iteration in (25, 45):
        Path(paths.drained_part(str(run), iteration)).write_bytes(bytes(7))
    (run / ".ckpt-0000000025.json.77.abc.tmp").touch()
    catalog = RunCatalog(str(run))
    for iteration in range(1, EVIDENCE_KEPT + 3):
        drained(run, iteration)
        catalog.quarantine(iteration, "flipped")
    done = Pruner(str(run), Retention(keep_last=9)).prune()
    assert done.deleted == []
    assert done.cleared == [10, 25, 1, 2]
    assert done.nbytes == 307
    bad = [name for name in names(run) if name.endswith(".bad")]
    assert bad == [f"ckpt-{iteration:010d}.bad" for iteration in (3, 4)]
    assert all(os.path.exists(paths.drained(str(run), iteration)) for iteration in (3, 4))
    assert [name for name in names(run) if name.startswith(".")] == [".ckpt-0000000045.h5.part"]  # may be at work


def test_killed_between_any_two_deletions_it_leaves_what_is_whole(tmp_path):
    """Each time a process is killed one deletion later; the next one comes to the end from there."""
    for number in range(1, 100):
        run = tmp_path / f"{number}" / "r"
        run.parent.mkdir()
        drained(run, 5, 10, 20, 30, 40)
        Path(paths.drained_part(str(run), 15)).touch()
        os.unlink(paths.drained_manifest(str(run), 5))
        child = os.fork()
        if child == 0:
            faults.load(f"catalog.delete:kill@{number}")
            Pruner(str(run), Retention(keep_last=2)).prune()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        catalog = RunCatalog(str(run), run_id="r")
        there = catalog.durable()
        assert there[:2] == [40, 30]
        for iteration in there:
            catalog.load(iteration)  # whole: never a manifest without its file
        Pruner(str(run), Retention(keep_last=2)).prune()
        assert names(run) == [f"ckpt-00000000{n}.{kind}" for n in (30, 40) for kind in ("h5", "json")]
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -9
    assert number > 8  # all of them were passed
