"""Prolog and epilog as slurmd runs them: as root, in a process of their own, on what users leave behind."""

import json
import os
import stat
import subprocess
import sys
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


def hook(name: str, bb: Path, **env: str) -> subprocess.CompletedProcess[str]:
    config = bb.parent / "hooks.json"
    config.write_text(json.dumps({"bb_root": str(bb), "log": str(bb.parent / "hooks.log")}))
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
    assert hook("epilog", bb).returncode == 0
    assert made.exists() == kept
    assert "kept" in (bb.parent / "hooks.log").read_text() if kept else True


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
