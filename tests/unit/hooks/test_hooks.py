"""Prolog and epilog as slurmd runs them: as root, in a process of their own, on what users leave behind."""

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

UID = 20001
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the hooks run as root")


@pytest.fixture
def bb(tmp_path: Path) -> Path:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
        if parent == Path("/tmp"):
            break
    path = tmp_path / "bb"
    path.mkdir()
    path.chmod(0o755)
    return path


def hook(name: str, bb: Path, keep: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    config = bb.parent / "hooks.json"
    more = {"keep": keep} if keep else {}
    config.write_text(json.dumps({"bb_root": str(bb), "log": str(bb.parent / "hooks.log"), **more}))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from slurm_resil.hooks import base, {name}; "
    code += f"sys.exit(base.main({name}.{name}, ['--config', {str(config)!r}]))"
    base = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(UID), "SLURM_JOB_GID": str(UID), "SPANK_SLURM_RESIL": "1"}
    return subprocess.run([sys.executable, "-I", "-c", code], env=base | env, capture_output=True, text=True)


def job(bb: Path) -> Path:
    done = hook("prolog", bb)
    assert done.returncode == 0, done.stderr
    return bb / "job-7"


def user_file(path: Path, text: str = "{}") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    for entry in (path.parent, path):
        os.chown(entry, UID, UID, follow_symlinks=False)


def test_the_directory_is_the_users_alone_and_is_kept_by_a_requeue(bb: Path) -> None:
    made = job(bb)
    info = made.stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (UID, UID, 0o700)
    user_file(made / "slots" / "0-0.h5")
    job(bb)
    assert (made / "slots" / "0-0.h5").exists()


def test_a_job_without_the_feature_gets_nothing(bb: Path) -> None:
    assert hook("prolog", bb, SPANK_SLURM_RESIL="").returncode == 0
    assert list(bb.iterdir()) == []


@pytest.mark.parametrize("value", ["", "../x", "7;rm", "-1", "7 ", "99999999999"])
def test_a_job_id_that_is_none_is_refused(bb: Path, value: str) -> None:
    done = hook("prolog", bb, SLURM_JOB_ID=value)
    assert done.returncode == 1
    assert "SLURM_JOB_ID" in done.stderr
    assert list(bb.iterdir()) == []


def test_another_users_directory_is_set_aside_and_a_link_is_not_followed(bb: Path) -> None:
    (bb / "job-7").mkdir()
    (bb / "job-7" / "theirs").write_text("x")
    made = job(bb)
    assert made.stat().st_uid == UID
    assert [path.read_text() for path in bb.glob("job-7.of-0.*/theirs")] == ["x"]
    made.rmdir()
    made.symlink_to("/etc")
    before = os.stat("/etc")
    job(bb)
    assert made.is_dir()
    assert not made.is_symlink()
    assert os.stat("/etc").st_uid == before.st_uid


def test_a_missing_or_open_burst_buffer_fails_with_its_path(bb: Path) -> None:
    bb.chmod(0o777)
    done = hook("prolog", bb)
    assert (done.returncode, str(bb) in done.stderr) == (1, True)
    bb.rmdir()
    done = hook("prolog", bb)
    assert (done.returncode, str(bb) in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("sealed", "durable", "goes_on", "kept"),
    [
        ((), (), False, False),
        ((5,), (), False, True),
        ((5,), (5,), False, False),
        ((5, 9), (5,), False, True),
        ((5, 9), (9,), False, False),
        ((9,), (9,), True, True),
    ],
)
def test_the_epilog_keeps_what_is_nowhere_else(
    bb: Path, sealed: tuple[int, ...], durable: tuple[int, ...], goes_on: bool, kept: bool
) -> None:
    made = job(bb)
    for number in sealed:
        user_file(made / "manifests" / f"{number:010d}-000000.json")
    for number in durable:
        user_file(made / "durable" / f"{number:010d}.json")
    if goes_on:
        user_file(made / "continue.json")
    user_file(made / "fetched" / "ckpt-0000000005.h5")
    assert hook("epilog", bb).returncode == 0
    assert made.exists() == kept
    assert (made / "fetched").exists() == goes_on  # that is nowhere else only while somebody may read it
    assert "kept" in (bb.parent / "hooks.log").read_text() if kept else True


@pytest.mark.parametrize(
    ("sealed", "encoded", "durable", "kept"),
    [
        ((), (5,), (), True),  # its own shards are bad and set aside: the others' can still be had
        ((5,), (9,), (5,), True),
        ((5, 9), (5, 9), (9,), False),
        ((), (5,), (9,), False),
    ],
)
def test_the_epilog_keeps_what_protects_other_nodes_as_it_keeps_shards(
    bb: Path, sealed: tuple[int, ...], encoded: tuple[int, ...], durable: tuple[int, ...], kept: bool
) -> None:
    made = job(bb)
    for number in sealed:
        user_file(made / "manifests" / f"{number:010d}-000000.json")
    for number in encoded:
        user_file(made / "redundancy" / f"{number:010d}-000001.json")
        user_file(made / "redundancy" / f"{number:010d}-000001.bin")
    for number in durable:
        user_file(made / "durable" / f"{number:010d}.json")
    user_file(made / "fetched" / "ckpt-0000000001.h5")
    assert hook("epilog", bb).returncode == 0
    assert made.exists() == kept
    if kept:  # all of it, or nothing, but for copies of what is on the parallel file system
        assert len(list((made / "redundancy").iterdir())) == 2 * len(encoded)
        assert not (made / "fetched").exists()


def test_parities_without_a_manifest_keep_nothing(bb: Path) -> None:
    """An encode that never came to its end protects nobody."""
    made = job(bb)
    for name in ("0000000005-000001.bin", ".0000000005-000001.bin.part"):
        user_file(made / "redundancy" / name)
    assert hook("epilog", bb).returncode == 0
    assert not made.exists()


@pytest.mark.parametrize("name", ["redundancy", "fetched"])
@pytest.mark.parametrize("durable", [False, True])
def test_links_among_parities_and_fetched_files_lead_nowhere(
    bb: Path, tmp_path: Path, name: str, durable: bool
) -> None:
    precious = tmp_path / "precious"
    user_file(precious / "0000000009-000001.json", "x")
    made = job(bb)
    (made / name).mkdir()
    os.chown(made / name, UID, UID)
    (made / name / "0000000009-000001.json").symlink_to(precious / "0000000009-000001.json")
    (made / name / "0000000009-000001.bin").symlink_to(precious)
    if durable:
        user_file(made / "durable" / "0000000009.json")
    assert hook("epilog", bb).returncode == 0
    assert made.exists() == (name == "redundancy" and not durable)
    assert (precious / "0000000009-000001.json").read_text() == "x"


@pytest.mark.parametrize("name", ["manifests", "redundancy", "durable"])
def test_a_directory_that_is_a_link_is_not_looked_into(bb: Path, tmp_path: Path, name: str) -> None:
    """What is in it is not known, so nothing goes."""
    precious = tmp_path / "precious"
    user_file(precious / "0000000009-000001.json", "x")
    made = job(bb)
    user_file(made / "slots" / "0-0.h5")
    (made / name).symlink_to(precious)
    assert hook("epilog", bb).returncode == 0
    assert (made / "slots" / "0-0.h5").exists()
    assert "could not be read" in (bb.parent / "hooks.log").read_text()
    assert (precious / "0000000009-000001.json").read_text() == "x"


def test_the_epilog_is_not_led_astray(bb: Path, tmp_path: Path) -> None:
    made, precious = job(bb), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (made / "slots").symlink_to(precious)
    (made / "hard").mkdir()
    os.link(precious / "file", made / "hard" / "file")
    os.mkfifo(made / "fifo")
    for path in (made / "hard", made / "fifo"):
        os.chown(path, UID, UID)
    assert hook("epilog", bb).returncode == 0
    assert (precious / "file").read_text() == "x"
    assert not made.exists()
    (bb / "job-7").symlink_to(precious)
    assert hook("epilog", bb).returncode == 0
    assert (precious / "file").read_text() == "x"


def test_a_configuration_that_others_can_write_is_refused(bb: Path) -> None:
    job(bb)
    config = bb.parent / "open.json"
    config.write_text(json.dumps({"bb_root": str(bb)}))
    config.chmod(0o666)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from slurm_resil.hooks import base; "
    code += "base.load_config(sys.argv[1])"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(config)], capture_output=True, text=True)
    assert "can be written by others" in done.stderr


def kept(bb: Path, age_s: float) -> Path:
    """What a job has left that is sealed and not durable, so long ago."""
    made = job(bb)
    user_file(made / "manifests" / "0000000005-000000.json")
    user_file(made / "slots" / "0-0.h5", "x")
    assert hook("epilog", bb).returncode == 0
    mark = bb / ".kept-job-7"
    assert mark.stat().st_uid == 0
    os.utime(mark, (mark.stat().st_atime - age_s, mark.stat().st_mtime - age_s))
    return made


def notes(bb: Path, event: str) -> list[dict[str, object]]:
    lines = (bb.parent / "hooks.log").read_text().splitlines()
    return [note for note in map(json.loads, lines) if note["event"] == event]


def test_what_is_kept_for_longer_than_the_site_wants_goes_and_is_named(bb: Path) -> None:
    made = kept(bb, 100)
    for keep in ("", "200"):
        assert hook("prolog", bb, keep=keep, SLURM_JOB_ID="8").returncode == 0
        assert (made / "slots" / "0-0.h5").exists()
    assert hook("prolog", bb, keep="50", SLURM_JOB_ID="8").returncode == 0
    assert sorted(path.name for path in bb.iterdir()) == ["job-8"]
    (note,) = notes(bb, "dropped")
    assert (note["job"], note["owner"], note["iterations"]) == ("7", UID, ["0000000005"])


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_dropped_is_named_in_the_runs_directory(bb: Path, durable: bool) -> None:
    made, run = kept(bb, 100), bb.parent / "run"
    run.mkdir()
    os.chown(run, UID, UID)
    about = {"run_dir": str(run), "job_id": 7, "attempt": 2, "node": "n1"}
    user_file(made / "run.json", json.dumps(about))
    if durable:
        (run / "ckpt-0000000005.json").write_text("{}")
    assert hook("prolog", bb, keep="50", SLURM_JOB_ID="8").returncode == 0
    path, limit = run / "ckpt-0000000005.dropped", time.monotonic() + 10
    while not path.exists() and time.monotonic() < limit and not durable:
        time.sleep(0.02)
    if durable:
        time.sleep(0.3)
        assert not path.exists()
        return
    record = json.loads(path.read_text())
    assert path.stat().st_uid == UID
    assert (record["iteration"], record["kept"], record["node"], record["attempt"]) == (5, False, "n1", 2)
    assert "the site keeps 50 s" in record["why"]


def test_what_somebody_is_at_work_on_or_what_is_in_use_again_is_left(bb: Path) -> None:
    made = kept(bb, 100)
    user_file(made / "late.lock", "")
    with open(made / "late.lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert hook("prolog", bb, keep="50", SLURM_JOB_ID="8").returncode == 0
    assert (made / "slots" / "0-0.h5").exists()
    assert len(notes(bb, "not_dropped")) == 1
    assert hook("prolog", bb, keep="50").returncode == 0  # the job itself is here again
    assert not (bb / ".kept-job-7").exists()
    assert hook("prolog", bb, keep="50", SLURM_JOB_ID="8").returncode == 0
    assert (made / "slots" / "0-0.h5").exists()


def test_a_directory_that_was_emptied_goes_with_the_next_prolog(bb: Path) -> None:
    made = kept(bb, 0)
    for top in ("manifests", "slots"):
        shutil.rmtree(made / top)
    assert hook("prolog", bb, SLURM_JOB_ID="8").returncode == 0
    assert sorted(path.name for path in bb.iterdir()) == ["job-8"]


def test_links_in_what_is_dropped_lead_nowhere(bb: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "0000000001-000000.json").write_text("x")
    made = kept(bb, 100)
    shutil.rmtree(made / "manifests")
    (made / "manifests").symlink_to(precious)
    (made / "late.lock").symlink_to(precious / "0000000001-000000.json")
    assert hook("prolog", bb, keep="50", SLURM_JOB_ID="8").returncode == 0
    assert (precious / "0000000001-000000.json").read_text() == "x"
    assert not made.exists()
    assert notes(bb, "dropped")[0]["iterations"] == []
