"""A sandbox as root: one keeper with everything in its namespaces; per node a holder and a pid 1 of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_resil.core import fsio
from slurm_resil.core.errors import ConfigError, ServiceError, TryAgainError, UsageError
from slurm_resil.sandbox.hosts import Command, ask_helper, daemon_env, helper, recorded, user_env
from slurm_resil.sandbox.procs import Proc, wait_gone
from slurm_resil.sandbox.spec import CONTROLLER, CONTROLLER_ADDRESS, USERS, Layout, SandboxSpec, node_address


@dataclass(frozen=True, kw_only=True)
class NamespaceHost:
    """See the module."""

    layout: Layout
    keeper: Proc

    mode = "namespaces"
    users = (*(user.name for user in USERS), "root")
    lost = ()

    @classmethod
    @contextlib.contextmanager
    def make(cls, layout: Layout) -> Iterator[NamespaceHost]:
        """Start the keeper; it survives the context only if that ends without an exception.

        Raises:
            ConfigError: The kernel or a container refuses.
        """
        read_end, write_end = os.pipe()
        try:
            binds = [[str(layout.etc / name), f"/etc/{name}"] for name in ("passwd", "group", "hosts")]
            if os.path.isdir("/etc/slurm"):
                binds.append([str(layout.etc), "/etc/slurm"])
            log = str(layout.log / "keeper.out")
            request = {"role": "keeper", "hostname": CONTROLLER, "binds": binds, "log": log}
            try:
                keeper = ask_helper(layout, request, stdin=read_end)
            except ServiceError as error:
                raise ConfigError(
                    f"this kernel or container refuses the sandbox's namespaces: {error}",
                    mend="CAP_SYS_ADMIN and PID, mount, network, UTS and IPC namespaces are needed, or --rootless",
                ) from error
            finally:
                os.close(read_end)
            keeper.save(layout.keeper)
            yield cls(layout=layout, keeper=keeper)
            os.write(write_end, b"go")
        finally:
            os.close(write_end)

    @property
    def keeper_pid(self) -> int:
        """Who kills this process kills the sandbox."""
        return self.keeper.pid

    def _start(self, role: str, join: Proc, name: str, **more: object) -> Proc:
        log = str(self.layout.log / f"{name}.out")
        proc = ask_helper(self.layout, {"role": role, "pid": join.pid, "start": join.start, "log": log, **more})
        proc.save(self.layout.procs / f"{name}.json")
        return proc

    def spawn(self, name: str, argv: Sequence[str]) -> Proc:
        """Start a daemon as a child of the keeper."""
        return self._start("spawn", self.keeper, name, argv=list(argv), env=daemon_env(self.layout))

    def start_node(self, name: str, argv: Sequence[str]) -> Proc:
        """Start the node's pid 1, which starts slurmd."""
        return self._start("node", self.holder(name), name, argv=list(argv), env=daemon_env(self.layout))

    def command(
        self, argv: Sequence[str], *, user: str, node: str | None, env: Mapping[str, str], cwd: str | None
    ) -> Command:
        """Enter the namespaces of the login node, or of a node, as the user."""
        if user not in self.users:
            raise UsageError(f"the sandbox has no user {user!r}; it has {', '.join(self.users)}")
        join = self.keeper if node in (None, CONTROLLER) else self._living(node or "")
        return self._enter(join, argv, user=user, env={**user_env(self.layout), **env}, cwd=cwd)

    def _enter(self, join: Proc, argv: Sequence[str], *, user: str, env: Mapping[str, str], cwd: str | None) -> Command:
        request = {
            "role": "exec",
            "pid": join.pid,
            "start": join.start,
            "argv": list(argv),
            "user": user,
            "env": dict(env),
            "cwd": cwd,
        }
        return Command(argv=helper(request), env=daemon_env(self.layout), cwd="/")

    def _ip(self, *arguments: str, stdin: str = "", join: Proc | None = None) -> str:
        env = daemon_env(self.layout)
        command = self._enter(join or self.keeper, ["ip", *arguments], user="root", env=env, cwd="/")
        try:
            done = subprocess.run(
                command.argv,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=60.0,
                env=command.env,
                cwd=command.cwd,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceError("ip did not end within 60 s") from error
        if done.returncode != 0:
            raise ServiceError(f"ip {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def make_nodes(self, spec: SandboxSpec) -> None:
        """Make all nodes' namespaces, the bridge, and the links between them.

        Raises:
            ConfigError: The kernel has no bridge, veth or tmpfs for us.
        """
        try:
            self._make_nodes(spec)
        except ServiceError as error:
            raise ConfigError(
                f"the nodes' network or mounts cannot be made: {error}",
                mend="a kernel with bridge, veth and tmpfs is needed (`modprobe bridge veth`), or --rootless",
            ) from error

    def _make_nodes(self, spec: SandboxSpec) -> None:
        bb = str(self.layout.bb)
        holders = {
            name: self._start("holder", self.keeper, f"holder-{name}", hostname=name, bb=bb, bb_bytes=spec.bb_bytes)
            for name in spec.node_names
        }
        batch = [
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {CONTROLLER_ADDRESS}/24 dev br0",
            "link set br0 up",
        ]
        for index, name in enumerate(spec.node_names, start=1):
            batch.append(f"link add ve{index} type veth peer name eth0 netns {_inner_pid(holders[name])}")
            batch.append(f"link set ve{index} master br0 up")
        self._ip("-batch", "-", stdin="\n".join(batch) + "\n")
        for index, name in enumerate(spec.node_names, start=1):
            lines = ("link set lo up", f"addr add {node_address(index)}/24 dev eth0", "link set eth0 up")
            self._ip("-batch", "-", stdin="\n".join(lines) + "\n", join=holders[name])

    def holder(self, name: str) -> Proc:
        """The process that keeps a node's namespaces.

        Raises:
            UsageError: There is no such node.
            ServiceError: It is gone: the sandbox is broken.
        """
        proc = recorded(self.layout, f"holder-{name}")
        if not proc.alive:
            raise ServiceError(f"the namespaces of node {name} are gone", mend="end the sandbox and start a new one")
        return proc

    def _living(self, name: str) -> Proc:
        init = recorded(self.layout, name)
        if not init.alive:
            raise TryAgainError(f"node {name} is dead", mend=f"`slurm-resil sandbox node restore {name}` starts it")
        return init

    def kill_node(self, name: str) -> None:
        """SIGKILL the node's pid 1; the kernel kills the rest of its PID namespace before it is gone."""
        init = recorded(self.layout, name)
        if init.alive:
            init.kill()
            wait_gone([init])

    def set_link(self, index: int, *, up: bool) -> None:
        """Plug or unplug the cable of a node: at the bridge's end, so that the node's own end stays configured."""
        self._ip("link", "set", f"ve{index}", "up" if up else "down")

    def link_states(self, spec: SandboxSpec) -> dict[str, str]:
        """``up`` or ``down`` for each node's link."""
        entries = json.loads(self._ip("-j", "link", "show", "master", "br0"))
        up = {entry["ifname"] for entry in entries if "UP" in entry.get("flags", ())}
        return {name: "up" if f"ve{index}" in up else "down" for index, name in enumerate(spec.node_names, start=1)}

    def node_path(self, name: str, path: str) -> Path:
        """Through the holder's root: works for a dead node too."""
        return Path(f"/proc/{self.holder(name).pid}/root") / path.lstrip("/")

    def wipe(self, name: str) -> None:
        """Empty the burst buffer and ``/dev/shm`` of a node, running or not."""
        for path in (str(self.layout.bb), "/dev/shm"):  # noqa: S108 - the node's own
            with fsio.open_dir(self.node_path(name, path)) as fd:
                for entry in os.listdir(fd):
                    fsio.rmtree_at(fd, entry)


def _inner_pid(proc: Proc) -> int:
    """The process's pid as the keeper's PID namespace numbers it (the last one: a holder has none below)."""
    with open(f"/proc/{proc.pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    raise ServiceError(f"process {proc.pid} tells no NSpid", mend="a kernel with PID namespaces is needed")
