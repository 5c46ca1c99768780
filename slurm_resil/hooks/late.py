"""Hands a job's sealed shards over to a process of the job's user, which outlives the epilog and makes them durable.

It is nobody's child and in no session of slurmd's; it has the user's rights alone, an environment of its own, no open
file of root's, and bounds of its own: it gives way to everybody else for processor, disk and memory, and it is ended
when its time is over, whatever it does.
"""

from __future__ import annotations

import os

from slurm_resil.core.latecall import command, environment

LIMIT_S = 3600
GRACE_S = 60
MEMORY_BYTES = 4 << 30
_LOG = "late.log"


def hand_over(config: dict[str, object], root: int, name: str, uid: int, gid: int, node: str) -> int:
    """Start the process; returns its number, 0 if it could not be started.

    Args:
        config: The hooks' configuration.
        root: The burst buffer's root, open.
        name: The job's directory in it.
        uid: The job's user.
        gid: The group of the job's directory.
        node: Slurm's name of this node.
    """
    limit = int(str(config.get("late_limit") or LIMIT_S))
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            grandchild = os.fork()
            if grandchild:
                os.write(mouth, b"%d" % grandchild)
                os._exit(0)
            os.close(mouth)
            os.close(ear)
            _become(root, name, uid, gid, limit)
            argv = command(os.path.join(str(config["bb_root"]), name), limit)
            os.execve(argv[0], argv, environment(**({"SLURMD_NODENAME": node} if node else {})))  # noqa: S606 - as the user, and nothing of it is the user's
        finally:
            os._exit(1)
    os.close(mouth)
    os.waitpid(child, 0)
    told = os.read(ear, 32)
    os.close(ear)
    return int(told or b"0")


def _become(root: int, name: str, uid: int, gid: int, limit_s: int) -> None:
    """Give up everything of root's; what cannot be given up ends the process."""
    import contextlib
    import resource
    import signal

    os.chdir("/")
    os.umask(0o077)
    _groups(uid, gid)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # the first one to go when the next job needs the memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    for one in range(1, signal.NSIG):
        if one not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(one, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if os.geteuid() == 0:
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    signal.alarm(limit_s + GRACE_S)  # it holds through exec
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        log = os.open(_LOG, flags, 0o600, dir_fd=inside)
    except OSError:
        log = os.open("/dev/null", os.O_WRONLY)  # what is there is no file
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _groups(uid: int, gid: int) -> None:
    """The user's groups: the run's directory may be readable by one of them only."""
    import pwd

    if os.geteuid() != 0:
        return
    try:
        os.initgroups(pwd.getpwuid(uid).pw_name, gid)
    except (KeyError, OSError):
        os.setgroups([])
