"""Epilog: remove what is durable, keep the rest and name it; have the user's own process make it durable.

The marks are files of the user, in the user's own directory: a lie in them costs the user's own data only. Everything
in it is looked at and removed as that user, so that no link leads anywhere the user could not go.
"""

from __future__ import annotations

import os
import stat
import sys
import time

from slurm_resil.hooks import base, late, sweep

LIMIT_S = 20.0  # for what runs as the user


def epilog(env: dict[str, str], config: dict[str, object]) -> None:
    """Clear ``<bb_root>/job-<id>`` unless the run goes on under this job id or holds what is nowhere else."""
    job, uid = base.number(env, "SLURM_JOB_ID"), base.number(env, "SLURM_JOB_UID")
    name = f"job-{job}"
    root = base.open_root(config)
    try:
        try:
            info = os.stat(name, dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid:
            base.note(config, "left_alone", job=job, why=f"{name} is not the directory of uid {uid}")
            return
        code = _as_user(root, name, uid, info.st_gid)
        if code not in (0, GOES_ON):
            sweep.mark(root, name)
        if code == 0:
            try:
                os.rmdir(name, dir_fd=root)
                sweep.unmark(root, name)
            except OSError as error:
                base.note(config, "kept", job=job, why=f"not empty: {error.strerror}")
        elif code == NOT_DURABLE and config.get("late") and (pid := _hand_over(config, root, name, info, env)):
            base.note(config, "handed_over", job=job, why=_WHY[code], pid=pid)
        else:
            base.note(config, "kept", job=job, why=_WHY.get(code, f"code {code}"))
    finally:
        os.close(root)


def _hand_over(config: dict[str, object], root: int, name: str, info: os.stat_result, env: dict[str, str]) -> int:
    """Have it made durable; the process's number, 0 if there is none."""
    try:
        return late.hand_over(config, root, name, info.st_uid, info.st_gid, env.get("SLURMD_NODENAME", ""))
    except OSError:
        return 0  # a node without processes to spare: it is kept


GOES_ON, NOT_DURABLE = 3, 4
_WHY = {
    GOES_ON: "the run goes on",
    NOT_DURABLE: "a sealed checkpoint is not durable",
    5: "something could not be read or removed",
}
_WHY[6] = f"it took over {LIMIT_S:g} s"


def _as_user(root: int, name: str, uid: int, gid: int) -> int:
    """Decide and remove in a child that is the user; returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 5
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(gid, gid, gid)
                os.setresuid(uid, uid, uid)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            code = clear(fd)
        finally:
            os._exit(code)
    # the user may stop or trace it, or have it wait for a file system of his own: the node waits for nobody
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, 9)  # SIGKILL; the module of that name costs as much as all else here
    time.sleep(0.05)
    os.waitpid(child, os.WNOHANG)
    return 6


def clear(fd: int) -> int:
    """Empty the job's directory that is open, if nothing in it is needed; 0, or the code of why it stays."""
    from slurm_resil.core.rmtree import rmtree_at

    if _exists(fd, "continue.json"):
        return GOES_ON
    # what protects shards of other nodes counts as shards do: a node may have lost its own and still hold theirs
    held = _numbers(fd, "manifests", 2) + _numbers(fd, "redundancy", 2)
    durable = _numbers(fd, "durable", 1)
    # an older one that was never drained is superseded by a newer one that is durable
    if held and (not durable or max(held) > max(durable)):
        rmtree_at(fd, "fetched")  # copies of what is on the parallel file system
        return NOT_DURABLE
    for entry in os.listdir(fd):
        rmtree_at(fd, entry)
    return 0


def _exists(fd: int, name: str) -> bool:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False).st_size > 0
    except FileNotFoundError:
        return False


def _number(name: str, parts: int) -> int | None:
    """First number of a name of so many numbers, as in ``0000000040-000003.json``; without ``re``, which is slow."""
    numbers = name.removesuffix(".json").split("-")
    if not name.endswith(".json") or len(numbers) != parts or not all(n.isascii() and n.isdigit() for n in numbers):
        return None
    return int(numbers[0]) if 10 <= len(numbers[0]) <= 19 else None


def _numbers(fd: int, name: str, parts: int) -> list[int]:
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        return []
    try:
        return [number for entry in os.listdir(inner) if (number := _number(entry, parts)) is not None]
    finally:
        os.close(inner)


if __name__ == "__main__":
    sys.exit(base.main(epilog, sys.argv[1:]))
