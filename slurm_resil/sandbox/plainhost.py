"""A sandbox without root: several slurmd on one address of this host, told apart by their ports."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_resil.core import fsio
from slurm_resil.core.errors import ServiceError, UsageError
from slurm_resil.sandbox import conf
from slurm_resil.sandbox.hosts import Command, ask_helper, daemon_env, recorded, user_env
from slurm_resil.sandbox.procs import Proc
from slurm_resil.sandbox.spec import CONTROLLER, Layout, SandboxSpec
from slurm_resil.sandbox.sweep import NODE_ENV, kill_matching, of_node

_LOCALHOST = "127.0.0.1"
_PORTS = range(20000, 32000)


def endpoints(spec: SandboxSpec, layout: Layout) -> conf.Endpoints:
    """Pick free ports. Daemons listen on loopback alone where this host's name resolves to it, as on a plain Debian."""
    host = socket.gethostname().partition(".")[0]
    address, loopback_only = _LOCALHOST, False
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(socket.gethostname())
        if ipaddress.ip_address(resolved).is_loopback:
            address, loopback_only = resolved, True
    ports = _free_ports(spec.nodes + 3)
    return conf.Endpoints(
        host=host,
        address=address,
        slurmctld_port=ports[0],
        slurmdbd_port=ports[1],
        db_port=ports[2],
        node_ports=ports[3:],
        user=pwd.getpwuid(os.geteuid()).pw_name,
        munge_socket=str(layout.run / "munge.sock"),
        private=False,
        loopback_only=loopback_only,
    )


def _free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody listens on, below those that the kernel gives to clients.

    Raises:
        ServiceError: Too few are free.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, k=len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise ServiceError(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop} are free")


@dataclass(frozen=True, kw_only=True)
class PlainHost:
    """See the module."""

    layout: Layout
    at: conf.Endpoints

    mode = "rootless"
    keeper_pid = None

    @property
    def users(self) -> tuple[str, ...]:
        """The one who started it."""
        return (self.at.user,)

    @property
    def lost(self) -> tuple[str, ...]:
        """What namespaces would give."""
        lines = [
            "all nodes have this host's name, network and /dev/shm: no `node cut`, no `node heal`",
            f"jobs run as {self.at.user} only",
            f"burst buffers are plain directories {self.layout.bb}/NODE: no common path, no size limit",
            "`node kill` and `down` find processes by environment and descent, not by a PID namespace",
        ]
        if not self.at.loopback_only:
            lines.append("this host's name is not a loopback address: the daemons listen on all of its addresses")
        return tuple(lines)

    def make_nodes(self, spec: SandboxSpec) -> None:
        """One burst buffer directory per node."""
        for name in spec.node_names:
            (self.layout.bb / name).mkdir(mode=0o755)

    def _start(self, name: str, argv: Sequence[str], **more: str) -> Proc:
        env = {**daemon_env(self.layout), **more}
        log = str(self.layout.log / f"{name}.out")
        proc = ask_helper(self.layout, {"role": "spawn", "argv": list(argv), "env": env, "log": log})
        proc.save(self.layout.procs / f"{name}.json")
        return proc

    def spawn(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a daemon in a session of its own."""
        return self._start(name, argv)

    def start_node(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a slurmd, its stepds marked with the node's name."""
        return self._start(name, argv, **{NODE_ENV: name})

    def command(
        self, argv: Sequence[str], *, user: str, node: str | None, env: Mapping[str, str], cwd: str | None
    ) -> Command:
        """Run it right here, with the sandbox's environment."""
        if user != self.at.user:
            raise UsageError(f"a sandbox without root has no user {user!r}; it has {self.at.user}")
        entry = pwd.getpwnam(user)
        who = {"HOME": str(self.layout.home / user), "USER": user, "LOGNAME": user, "SHELL": entry.pw_shell}
        if node not in (None, CONTROLLER):
            recorded(self.layout, node or "")
            who["SLURMD_NODENAME"] = node or ""
        return Command(
            argv=list(argv), env={**user_env(self.layout), **who, **env}, cwd=cwd or str(self.layout.home / user)
        )

    def kill_node(self, name: str) -> None:
        """SIGKILL slurmd, its stepds and all below them."""
        kill_matching(of_node(self.layout, name), also=[recorded(self.layout, name)])

    def set_link(self, index: int, *, up: bool) -> None:
        """There is none.

        Raises:
            UsageError: Always when unplugging.
        """
        if not up:
            raise UsageError("a sandbox without root has no links to take down", mend="run it as root", node=index)

    def link_states(self, spec: SandboxSpec) -> dict[str, str]:
        """All up."""
        return dict.fromkeys(spec.node_names, "up")

    def node_path(self, name: str, path: str) -> Path:
        """The burst buffer is a directory per node; all else is this host's."""
        target = Path(path)
        if target.is_relative_to(self.layout.bb):
            return self.layout.bb / name / target.relative_to(self.layout.bb)
        return target

    def wipe(self, name: str) -> None:
        """Empty the node's burst buffer directory; ``/dev/shm`` is this host's and stays."""
        with fsio.open_dir(self.layout.bb / name) as fd:
            for entry in os.listdir(fd):
                fsio.rmtree_at(fd, entry)
