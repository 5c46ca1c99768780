"""What both kinds of sandbox share: the interface to its processes, their environments, and the helper program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurm_resil.core.errors import ServiceError, UsageError
from slurm_resil.sandbox import ns
from slurm_resil.sandbox.procs import Proc
from slurm_resil.sandbox.spec import Layout, SandboxSpec
from slurm_resil.sandbox.sweep import OF_ENV

_DAEMON_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_USER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HELPER_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to give to ``subprocess`` so that a command runs in the sandbox."""

    argv: list[str]
    env: dict[str, str]
    cwd: str


class Host(Protocol):
    """Where the processes of a sandbox run."""

    @property
    def mode(self) -> str:
        """``namespaces`` or ``rootless``."""

    @property
    def users(self) -> tuple[str, ...]:
        """Who can use it; the first one is the usual one."""

    @property
    def lost(self) -> tuple[str, ...]:
        """What this kind of sandbox cannot do."""

    @property
    def keeper_pid(self) -> int | None:
        """The process that keeps it."""

    def make_nodes(self, spec: SandboxSpec) -> None:
        """Make what the nodes' slurmds run in."""

    def spawn(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a daemon that outlives this process, its output in ``log/NAME.out``, and record it."""

    def start_node(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a node, which starts its slurmd."""

    def command(
        self, argv: Sequence[str], *, user: str, node: str | None, env: Mapping[str, str], cwd: str | None
    ) -> Command:
        """How to run ``argv`` on the login node, or inside ``node``, as ``user``.

        Raises:
            UsageError: No such node or user.
            TryAgainError: The node is dead.
        """

    def kill_node(self, name: str) -> None:
        """SIGKILL everything of a node."""

    def set_link(self, index: int, *, up: bool) -> None:
        """Plug or unplug the cable of a node.

        Raises:
            UsageError: Nodes have no links here.
        """

    def link_states(self, spec: SandboxSpec) -> dict[str, str]:
        """``up`` or ``down`` for each node's link."""

    def node_path(self, name: str, path: str) -> Path:
        """A path inside a node as seen from here."""

    def wipe(self, name: str) -> None:
        """Empty a node's burst buffer and ``/dev/shm``."""


def daemon_env(layout: Layout) -> dict[str, str]:
    """Environment of the sandbox's own processes; ``OF_ENV`` is how ``down`` finds those that no file tells of."""
    return {
        "PATH": _DAEMON_PATH,
        "LC_ALL": "C",
        "SLURM_CONF": str(layout.slurm_conf),
        OF_ENV: str(layout.dir),
    }


def user_env(layout: Layout) -> dict[str, str]:
    """Environment of a command in the sandbox, without what follows from its user.

    The commands of this interpreter's environment come first: ``slurm-resil`` is the one that runs the sandbox.
    """
    own = os.path.dirname(sys.executable)
    path = _USER_PATH if own in _USER_PATH.split(":") else f"{own}:{_USER_PATH}"
    env = {"PATH": path, "LANG": "C.UTF-8", "SLURM_CONF": str(layout.slurm_conf), OF_ENV: str(layout.dir)}
    env.update({name: os.environ[name] for name in ("TERM", "COLUMNS", "LINES") if name in os.environ})
    return env


def helper(request: Mapping[str, Any]) -> list[str]:
    """The command line of the helper program for one request."""
    return [sys.executable, "-I", "-S", ns.__file__, json.dumps(request)]


def ask_helper(layout: Layout, request: Mapping[str, Any], *, stdin: int = subprocess.DEVNULL) -> Proc:
    """Let the helper program start a process.

    Raises:
        ServiceError: It could not.
    """
    try:
        done = subprocess.run(
            helper(request),
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=_HELPER_TIMEOUT_S,
            env=daemon_env(layout),
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"the {request['role']} helper did not answer in {_HELPER_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise ServiceError(f"the {request['role']} helper failed: {said}")
    pid = int(done.stdout)
    return Proc.of(pid) or Proc(pid=pid, start=0)


def recorded(layout: Layout, name: str) -> Proc:
    """A process that the sandbox started.

    Raises:
        UsageError: It started none of this name.
    """
    proc = Proc.load(layout.procs / f"{name}.json")
    if proc is None:
        raise UsageError(f"there is no node {name!r} in the sandbox {layout.dir}", node=name)
    return proc
