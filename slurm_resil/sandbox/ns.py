"""Namespaces of the sandbox: the one program that makes, joins and keeps them.

It runs by path (``python -I -S ns.py REQUEST``, REQUEST is JSON), so it imports the standard library only and starts
in a few hundredths of a second. Roles:

- ``keeper``: make the top PID, mount, network, UTS and IPC namespaces and stay as their pid 1. Whoever kills it kills
  all of the sandbox. Until it reads ``go`` on its standard input it lives no longer than the process that started it.
- ``holder``: inside the keeper's namespaces, make those of one node and keep them, without being its pid 1.
- ``node``: inside the holder's, make a PID namespace and be its pid 1: start slurmd, reap.
- ``spawn``: inside the keeper's, start a daemon as a child of the keeper; or right here, in a session of its own.
- ``exec``: run a command inside some process's namespaces as a user, and end as it ends.

All but ``exec`` print the new process's pid as the caller's PID namespace numbers it. (Its start time is for the caller
to read: once this program has joined a mount namespace, ``/proc`` shows other pids than its own.)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Request = dict[str, Any]

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1
_READY_TIMEOUT_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _unshare(flags: int) -> None:
    _call("unshare", _libc.unshare(flags))


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode())
    _call(f"mount {kind or source} on {target}", result)


def _private_mounts() -> None:
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)


def _mount_proc() -> None:
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def start_ticks(pid: int) -> int:
    """Start time of a process, in clock ticks since boot: with the pid it names a process for good.

    Raises:
        ProcessLookupError: There is no such process, or only its zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(pid)
    return int(fields[19])


def _join(pid: int, start: int, *, pid_ns: bool = True) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        if start_ticks(pid) != start:
            raise ProcessLookupError(f"process {pid} is another one now")
        flags = _NEWNS | _NEWNET | _NEWUTS | _NEWIPC | (_NEWPID if pid_ns else 0)
        _call("setns", _libc.setns(pidfd, flags))
    finally:
        os.close(pidfd)


def _redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)


def _execve(argv: list[str], env: dict[str, str]) -> NoReturn:
    # the interpreter ignores these two, and what is ignored stays so across exec
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    os.execvpe(argv[0], argv, env)  # noqa: S606 - a list, no shell


def refusal(name: str, error: OSError, path: str) -> tuple[str, int]:
    """Why a command was not executed, for people, and the exit code that a shell gives."""
    if not isinstance(error, FileNotFoundError):
        return f"cannot run {name}: {error.strerror}", 126
    where = "" if "/" in name else f" in {path}"
    return f"cannot run {name}: there is no such command{where}", 127


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _reap_forever() -> NoReturn:
    while True:
        signal.sigwait({signal.SIGCHLD})
        _reap_all()


def _start(body: Callable[[socket.socket], None], *, double: bool, new_pid_ns: bool = False) -> None:
    """Run ``body`` in a new process, print which one it is, and return when it has closed its socket.

    Args:
        body: Gets the socket; sends anything once to say which process it is, closes it (or execs) when it is set up,
            sends a text before it gives up.
        double: Fork twice, so that the process's parent is the pid 1 of the joined PID namespace.
        new_pid_ns: Make the process pid 1 of a new PID namespace.
    """
    # the kernel translates the sender's pid in the credentials into the receiver's PID namespace
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.settimeout(_READY_TIMEOUT_S)
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            os.setsid()
            if new_pid_ns:
                _unshare(_NEWPID | _NEWNS)
            if double and os.fork():
                os._exit(0)
            theirs.send(b"here")
            body(theirs)
        except BaseException as error:  # noqa: BLE001 - a forked child: report, never return into the parent's code
            with contextlib.suppress(OSError):
                theirs.send(f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    theirs.close()
    if double:
        os.waitpid(child, 0)
    said, ancillary, _, _ = ours.recvmsg(4096, socket.CMSG_SPACE(12))
    if said != b"here":
        raise RuntimeError(said.decode(errors="replace") or "a helper process died at its start")
    pid = struct.unpack("3i", ancillary[0][2][:12])[0]
    problem = ours.recv(4096)
    if problem:
        raise RuntimeError(problem.decode(errors="replace"))
    print(pid, flush=True)  # noqa: T201 - the answer of this program


def _keeper(request: Request) -> None:
    _unshare(_NEWPID | _NEWNS | _NEWNET | _NEWUTS | _NEWIPC)

    def body(ready: socket.socket) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        _private_mounts()
        _mount_proc()
        _mount("tmpfs", "/run", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=64m")
        for path, mode in (("/run/lock", 0o1777), ("/run/munge", 0o755)):
            os.mkdir(path)
            os.chmod(path, mode)
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")  # noqa: S108
        for source, target in request["binds"]:
            _mount(source, target, flags=_MS_BIND)
        socket.sethostname(request["hostname"])
        stdin = os.dup(0)
        _redirect(request["log"])
        os.chdir("/")
        ready.close()
        poll = select.poll()
        poll.register(stdin, select.POLLIN)
        while not poll.poll(100):
            _reap_all()
        if os.read(stdin, 2) != b"go":
            os._exit(1)  # who started us is gone: pid 1 takes everything with it
        os.close(stdin)
        _reap_all()
        _reap_forever()

    _start(body, double=False)


def _holder(request: Request) -> None:
    def body(ready: socket.socket) -> None:
        _unshare(_NEWNS | _NEWNET | _NEWUTS | _NEWIPC)
        _private_mounts()
        socket.sethostname(request["hostname"])
        munge = os.open("/run/munge", os.O_RDONLY | os.O_DIRECTORY)
        _mount("tmpfs", "/run", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=64m")
        os.mkdir("/run/lock")
        os.chmod("/run/lock", 0o1777)  # noqa: S103 - as on any system, and the node's own
        os.mkdir("/run/munge", 0o755)
        _mount(f"/proc/self/fd/{munge}", "/run/munge", flags=_MS_BIND)
        os.close(munge)
        size = int(request["bb_bytes"])
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={size}")  # noqa: S108
        _mount("tmpfs", request["bb"], "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=0755,size={size}")
        _redirect(request["log"])
        os.chdir("/")
        ready.close()
        while True:
            signal.pause()

    _join(request["pid"], request["start"])
    _start(body, double=True)


def _node(request: Request) -> None:
    def body(ready: socket.socket) -> None:
        _private_mounts()
        _mount_proc()
        _redirect(request["log"])
        os.chdir("/")
        if os.fork() == 0:
            os.setsid()
            _execve(request["argv"], request["env"])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        ready.close()
        _reap_all()
        _reap_forever()

    _join(request["pid"], request["start"])
    _start(body, double=True, new_pid_ns=True)


def _spawn(request: Request) -> None:
    def body(ready: socket.socket) -> None:
        _redirect(request["log"])
        os.chdir("/")
        _execve(request["argv"], request["env"])

    if "pid" in request:
        _join(request["pid"], request["start"])
    _start(body, double=True)


def _become(user: str) -> dict[str, str]:
    import pwd

    entry = pwd.getpwnam(user)
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    return {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell}


def _exec(request: Request) -> NoReturn:
    _join(request["pid"], request["start"])
    new_session = not os.isatty(0)
    child = os.fork()
    if child == 0:
        try:
            who = _become(request["user"])
            if new_session:
                os.setsid()
            _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
            os.chdir(request.get("cwd") or who["HOME"])
            try:
                _execve(request["argv"], {**who, **request["env"]})
            except OSError as error:
                words, code = refusal(request["argv"][0], error, request["env"].get("PATH", ""))
                os.write(2, f"slurm-resil: {words}\n".encode())
                os._exit(code)
        except Exception as error:  # noqa: BLE001 - a forked child: report, never return into the parent's code
            os.write(2, f"slurm-resil: cannot run {request['argv'][0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, forward if new_session else signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


_ROLES: dict[str, Callable[[Request], None]] = {
    "keeper": _keeper,
    "holder": _holder,
    "node": _node,
    "spawn": _spawn,
    "exec": _exec,
}


def main() -> None:
    """Serve the request in ``argv``."""
    request: Request = json.loads(sys.argv[1])
    try:
        _ROLES[request["role"]](request)
    except (OSError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
