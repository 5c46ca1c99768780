"""Where the sandbox's processes run: in namespaces of their own (as root), or beside each other on this host."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurm_resil.core.errors import ConfigError, ServiceError, TryAgainError, UsageError
from slurm_resil.sandbox import ns
from slurm_resil.sandbox.procs import Proc
from slurm_resil.sandbox.spec import CONTROLLER, CONTROLLER_ADDRESS, USERS, Layout, SandboxSpec, node_address

OF_ENV = "SLURM_RESIL_SANDBOX_OF"
_DAEMON_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_USER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HELPER_TIMEOUT_S = 60.0


def daemon_env(layout: Layout) -> dict[str, str]:
    """Environment of the sandbox's own processes; ``OF_ENV`` is how ``down`` finds those that no file tells of."""
    return {
        "PATH": _DAEMON_PATH,
        "LC_ALL": "C",
        "SLURM_CONF": str(layout.slurm_conf),
        OF_ENV: str(layout.dir),
    }


def user_env(layout: Layout) -> dict[str, str]:
    """Environment of a command in the sandbox, without what follows from its user."""
    env = {"PATH": _USER_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(layout.slurm_conf)}
    env.update({name: os.environ[name] for name in ("TERM", "COLUMNS", "LINES") if name in os.environ})
    return env


class Host(Protocol):
    """How processes of a sandbox are started."""

    def spawn(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a daemon that outlives this process, its output in ``log/NAME.out``, and record it."""

    def command(
        self, argv: Sequence[str], *, user: str, node: str | None, env: Mapping[str, str], cwd: str | None
    ) -> tuple[list[str], dict[str, str], str | None]:
        """What to run, with which environment and where, so that ``argv`` runs in the sandbox."""

    def start_node(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a node: its slurmd, in whatever makes a node here."""


def _request(layout: Layout, request: Mapping[str, Any], *, stdin: int = subprocess.DEVNULL) -> Proc:
    argv = [sys.executable, "-I", "-S", ns.__file__, json.dumps(request)]
    env = daemon_env(layout)
    try:
        done = subprocess.run(
            argv, stdin=stdin, capture_output=True, text=True, timeout=_HELPER_TIMEOUT_S, env=env, cwd="/", check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"the {request['role']} helper did not answer in {_HELPER_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        if request["role"] == "keeper":
            raise ConfigError(
                f"this kernel or container refuses the sandbox's namespaces: {said}",
                mend="it needs CAP_SYS_ADMIN and PID, mount, network, UTS and IPC namespaces; --rootless does without",
            )
        raise ServiceError(f"the {request['role']} helper failed: {said}")
    pid = int(done.stdout)
    return Proc.of(pid) or Proc(pid=pid, start=0)


@dataclass(frozen=True, kw_only=True)
class NamespaceHost:
    """Root: one keeper with everything in its namespaces; a holder and a pid 1 per node."""

    layout: Layout
    keeper: Proc

    @classmethod
    @contextlib.contextmanager
    def make(cls, layout: Layout) -> Iterator[NamespaceHost]:
        """Start the keeper; it survives the context only if that ends without an exception."""
        read_end, write_end = os.pipe()
        try:
            binds = [[str(layout.etc / name), f"/etc/{name}"] for name in ("passwd", "group", "hosts")]
            if os.path.isdir("/etc/slurm"):
                binds.append([str(layout.etc), "/etc/slurm"])
            request = {
                "role": "keeper",
                "hostname": CONTROLLER,
                "binds": binds,
                "log": str(layout.log / "keeper.out"),
            }
            try:
                keeper = _request(layout, request, stdin=read_end)
            finally:
                os.close(read_end)
            keeper.save(layout.keeper)
            yield cls(layout=layout, keeper=keeper)
            os.write(write_end, b"go")
        finally:
            os.close(write_end)

    def spawn(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a daemon as a child of the keeper."""
        return self._spawn("spawn", self.keeper, name, argv=list(argv), env=daemon_env(self.layout))

    def _spawn(self, role: str, join: Proc, name: str, **more: object) -> Proc:
        log = str(self.layout.log / f"{name}.out")
        proc = _request(self.layout, {"role": role, "pid": join.pid, "start": join.start, "log": log, **more})
        proc.save(self.layout.procs / f"{name}.json")
        return proc

    def command(
        self, argv: Sequence[str], *, user: str, node: str | None, env: Mapping[str, str], cwd: str | None
    ) -> tuple[list[str], dict[str, str], str | None]:
        """Enter the namespaces of the login node, or of a node, as the user."""
        join = self.keeper if node in (None, CONTROLLER) else self.node(node or "")
        request = {
            "role": "exec",
            "pid": join.pid,
            "start": join.start,
            "argv": list(argv),
            "user": user,
            "env": {**user_env(self.layout), **env},
            "cwd": cwd,
        }
        return [sys.executable, "-I", "-S", ns.__file__, json.dumps(request)], daemon_env(self.layout), "/"

    def run(self, argv: Sequence[str], *, stdin: str = "", join: Proc | None = None, timeout_s: float = 60.0) -> str:
        """Run a command as root inside the namespaces of the login node, or of ``join``; its output.

        Raises:
            ServiceError: It failed, or took too long.
        """
        target = join or self.keeper
        request = {
            "role": "exec",
            "pid": target.pid,
            "start": target.start,
            "argv": list(argv),
            "user": "root",
            "env": daemon_env(self.layout),
            "cwd": "/",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", ns.__file__, json.dumps(request)],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=daemon_env(self.layout),
                cwd="/",
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{argv[0]} did not end within {timeout_s:g} s") from error
        if done.returncode != 0:
            raise ServiceError(f"{' '.join(argv[:3])} failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def holder(self, name: str) -> Proc:
        """The process that keeps a node's namespaces.

        Raises:
            UsageError: There is no such node.
        """
        return self._recorded(name, f"holder-{name}")

    def node(self, name: str) -> Proc:
        """The node's pid 1.

        Raises:
            UsageError: There is no such node.
            TryAgainError: The node is dead.
        """
        init = self._recorded(name, name)
        if not init.alive:
            raise TryAgainError(f"node {name} is dead", mend=f"`slurm-resil sandbox node restore {name}` starts it")
        return init

    def _recorded(self, node: str, record: str) -> Proc:
        proc = Proc.load(self.layout.procs / f"{record}.json")
        if proc is None:
            raise UsageError(f"there is no node {node!r} in the sandbox {self.layout.dir}", node=node)
        return proc

    def make_nodes(self, spec: SandboxSpec) -> None:
        """Make all nodes' namespaces, the bridge, and the links between them."""
        holders: dict[str, Proc] = {}
        for name in spec.node_names:
            holders[name] = self._spawn(
                "holder",
                self.keeper,
                f"holder-{name}",
                hostname=name,
                bb=str(self.layout.bb),
                bb_bytes=spec.bb_bytes,
            )
        batch = [
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {CONTROLLER_ADDRESS}/24 dev br0",
            "link set br0 up",
        ]
        for index, name in enumerate(spec.node_names, start=1):
            inner = self._inner_pid(holders[name])
            batch.append(f"link add ve{index} type veth peer name eth0 netns {inner}")
            batch.append(f"link set ve{index} master br0 up")
        self.run(["ip", "-batch", "-"], stdin="\n".join(batch) + "\n")
        for index, name in enumerate(spec.node_names, start=1):
            lines = ["link set lo up", f"addr add {node_address(index)}/24 dev eth0", "link set eth0 up"]
            self.run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n", join=holders[name])

    @staticmethod
    def _inner_pid(proc: Proc) -> int:
        """The process's pid as the keeper's PID namespace numbers it (the last one: a holder has none below)."""
        with open(f"/proc/{proc.pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
        raise ServiceError(f"process {proc.pid} tells no NSpid", mend="a kernel with PID namespaces is needed")

    def start_node(self, name: str, argv: Sequence[str]) -> Proc:
        """Start the node's pid 1, which starts slurmd."""
        return self._spawn("node", self.holder(name), name, argv=list(argv), env=daemon_env(self.layout))

    def link_states(self, spec: SandboxSpec) -> dict[str, str]:
        """``up`` or ``down`` for each node's link."""
        up = {
            entry["ifname"]: "UP" in entry["flags"]
            for entry in json.loads(self.run(["ip", "-j", "link", "show", "master", "br0"]))
            if "ifname" in entry
        }
        return {name: "up" if up.get(f"ve{index}") else "down" for index, name in enumerate(spec.node_names, start=1)}

    def set_link(self, index: int, *, up: bool) -> None:
        """Plug or unplug the cable of a node."""
        self.run(["ip", "link", "set", f"ve{index}", "up" if up else "down"])

    def root_of(self, name: str) -> Path:
        """The node's root directory as seen from here."""
        return Path(f"/proc/{self.holder(name).pid}/root")


def known_user(name: str) -> str:
    """Check a user's name.

    Raises:
        UsageError: The sandbox has no such user.
    """
    names = ("root", *(user.name for user in USERS))
    if name not in names:
        raise UsageError(f"the sandbox has no user {name!r}; it has {', '.join(names)}")
    return name
