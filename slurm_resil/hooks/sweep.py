"""What the epilog has left in the burst buffer for longer than the site wants: gone through by the prolog.

The epilog leaves a mark of root's beside each directory that it keeps, ``.kept-job-<id>``; its time is the time from
which the directory's age counts, and only directories with a mark are looked at. Empty ones go at once: their late
drain has come to its end. Others go when they are older than ``keep``, if the site says so; whatever is in them is
removed as their owner, and named in the log.
"""

from __future__ import annotations

import os
import stat
import time

from slurm_resil.hooks import base

_MARK = ".kept-"
_AT_ONCE = 4  # of those that are removed by one prolog: a job waits for it
_LIMIT_S = 20.0


def mark(root: int, name: str) -> None:
    """Say that a directory is kept from now on, unless that was said before."""
    try:
        os.close(os.open(_MARK + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root))
    except OSError:
        return  # there is one, or no room for one: then it stays until somebody removes it


def unmark(root: int, name: str) -> None:
    """Take that back."""
    try:
        os.unlink(_MARK + name, dir_fd=root)
    except OSError:
        return


def sweep(config: dict[str, object], root: int, own: str) -> None:
    """Go through the directories that are kept, but that of the job itself, ``own``."""
    keep = config.get("keep")
    now, removed = time.time(), 0
    for entry in os.listdir(root):
        name = entry.removeprefix(_MARK)
        if name in (entry, own):
            continue
        try:
            age = now - os.stat(entry, dir_fd=root, follow_symlinks=False).st_mtime
        except OSError:  # without its age nothing is removed
            continue
        try:
            os.rmdir(name, dir_fd=root)
        except FileNotFoundError:
            unmark(root, name)
        except OSError:
            if keep and age > int(str(keep)) and removed < _AT_ONCE:
                removed += 1
                _try_to_remove(config, root, name, age)
        else:
            unmark(root, name)


def _try_to_remove(config: dict[str, object], root: int, name: str, age: float) -> None:
    try:
        _remove(config, root, name, age)
    except OSError as error:  # another prolog was faster, or the node has no processes to spare: the job starts
        base.note(config, "not_dropped", job=name.removeprefix("job-"), why=error.strerror)


def _remove(config: dict[str, object], root: int, name: str, age: float) -> None:
    info = os.stat(name, dir_fd=root, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode) or not info.st_uid:
        return
    words = f"kept for {age:.0f} s, the site keeps {config['keep']} s"
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ear)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(info.st_gid, info.st_gid, info.st_gid)
                os.setresuid(info.st_uid, info.st_uid, info.st_uid)
            code = _empty(root, name, mouth, words)
        finally:
            os._exit(code)
    os.close(mouth)
    code, end = 1, time.monotonic() + _LIMIT_S
    pid = 0
    while not pid and time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.001)
    if not pid:
        os.kill(child, 9)
    os.set_blocking(ear, False)
    try:
        held = os.read(ear, 4096).decode("ascii", "replace").split()
    except BlockingIOError:
        held = []
    os.close(ear)
    if code == 0:
        try:
            os.rmdir(name, dir_fd=root)
        except OSError:
            code = 1
        else:
            unmark(root, name)
    event = "dropped" if code == 0 else "not_dropped"
    base.note(config, event, job=name.removeprefix("job-"), owner=info.st_uid, iterations=held, why=words)


def _empty(root: int, name: str, mouth: int, words: str) -> int:
    """As the owner: say which iterations there are, then remove them; 1: somebody is at work on them."""
    import fcntl

    from slurm_resil.core.rmtree import rmtree_at

    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        lock = os.open("late.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    except OSError:
        pass  # there is none
    held: list[str] = []
    about = _about(fd)
    try:
        inner = os.open("manifests", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        numbers = {entry[:19].partition("-")[0] for entry in os.listdir(inner)}
        held = sorted((one for one in numbers if one.isascii() and one.isdigit()), key=int)[-16:]
        os.write(mouth, " ".join(held).encode())
    except OSError:
        pass
    for entry in os.listdir(fd):
        rmtree_at(fd, entry)
    if held:
        _record(about, int(held[-1]), words)
    return 0


def _about(fd: int) -> dict[str, object]:
    """What the directory says of its job: its owner's words, read and used with its owner's rights."""
    import json

    try:
        with open(os.open("run.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd), "rb") as file:
            raw = json.loads(file.read(1 << 16))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _record(about: dict[str, object], iteration: int, words: str) -> None:
    """Write down in the run's directory what is gone; by a process that may hang there, and that nobody waits for."""
    import json
    import signal

    from slurm_resil.core import paths

    run_dir = about.get("run_dir")
    if not isinstance(run_dir, str) or not run_dir.startswith("/") or os.fork():
        return
    try:
        os.setsid()
        signal.alarm(60)
        null = os.open("/dev/null", os.O_RDWR)
        for one in range(3):
            os.dup2(null, one)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        path = paths.dropped(run_dir, iteration)
        body = {name: about.get(name) for name in ("job_id", "attempt", "node")}
        body |= {"iteration": iteration, "why": words, "kept": False, "at_s": round(time.time(), 3)}
        temp = f"{path}.{os.getpid()}"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, json.dumps(body, sort_keys=True).encode() + b"\n")
        os.close(fd)
        if os.path.exists(paths.drained_manifest(run_dir, iteration)):
            os.unlink(temp)  # it is durable after all
        else:
            os.replace(temp, path)
    finally:
        os._exit(0)
