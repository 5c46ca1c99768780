"""The daemons of a sandbox: how each is started, and how we learn that it serves or why it does not."""

from __future__ import annotations

import datetime
import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slurm_resil.core import fsio
from slurm_resil.core.errors import ConfigError, ResilError, ServiceError
from slurm_resil.sandbox import conf
from slurm_resil.sandbox.hosts import Host
from slurm_resil.sandbox.procs import Proc, tail, wait_until
from slurm_resil.sandbox.spec import Layout, SandboxSpec

_SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
_PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}
_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")


def find_tools(*, accounting: bool, namespaces: bool) -> dict[str, str]:
    """Find the programs that the sandbox needs.

    Raises:
        ConfigError: Some are missing; names the Debian packages.
    """
    wanted = ["slurmctld", "slurmd", "scontrol", "munged", *(["ip"] if namespaces else [])]
    if accounting:
        wanted += _ACCOUNTING
    found = {name: shutil.which(name, path=_SEARCH) for name in wanted}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[name] for name in missing}))
        without = ", or a sandbox without accounting" if set(missing) <= set(_ACCOUNTING) else ""
        raise ConfigError(
            f"the sandbox needs {', '.join(missing)}, which this host does not have",
            mend=f"`apt-get install --no-install-recommends {packages}`{without}",
        )
    return {name: path for name, path in found.items() if path is not None}


def slurm_version(slurmctld: str) -> tuple[conf.Version, str]:
    """Ask slurmctld for its version: as numbers, and as it says it.

    Raises:
        ConfigError: It does not tell one.
    """
    try:
        done = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=30, check=False)
        text = done.stdout.strip()
        return conf.parse_version(text), text
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise ConfigError(f"{slurmctld} -V does not tell a version: {error}", path=slurmctld) from error


@dataclass(frozen=True, kw_only=True)
class Daemons:
    """Starts the daemons of one sandbox.

    Attributes:
        tools: Absolute path of each program, by its name.
    """

    host: Host
    spec: SandboxSpec
    layout: Layout
    at: conf.Endpoints
    tools: dict[str, str]

    def run(self, argv: list[str], *, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node as the daemons' user.

        Raises:
            ServiceError: It failed (with ``check``), or took too long.
        """
        extra = {"LC_ALL": "C", "TZ": "UTC"}
        command = self.host.command(argv, user=self.at.user, node=None, env=extra, cwd="/")
        try:
            done = subprocess.run(
                command.argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=command.env,
                cwd=command.cwd,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{os.path.basename(argv[0])} did not end within {timeout_s:g} s") from error
        if check and done.returncode != 0:
            name = " ".join((os.path.basename(argv[0]), *argv[1:3]))
            raise ServiceError(
                f"{name} failed with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}"
            )
        return done

    def failure(self, what: str, *logs: str) -> ResilError:
        """The error for a daemon that does not come up, with what its logs say.

        Args:
            what: What went wrong.
            logs: Names of logs, those first that tell most; those after one with a fatal error are not needed.
        """
        quotes: list[str] = []
        for name in logs:
            text = tail(self.layout.log / name, only_errors=True)
            if text:
                quotes.append(f"{name}:\n{text}")
            if "fatal" in text:
                break
        return ConfigError("\n".join((what, *self._in_their_terms("\n".join(quotes)))))

    def _in_their_terms(self, text: str) -> list[str]:
        """Name the line of the site's own file where Slurm names one of the file that we made of it, or none."""
        theirs = self.spec.slurm_conf_extra
        ours = self.layout.slurm_conf
        if theirs is None or not ours.is_file():
            return [text]
        rendered = ours.read_text(encoding="utf-8")

        def translate(match: re.Match[str]) -> str:
            number = conf.extra_line(rendered, int(match[1]))
            return match[0] if number is None else f"{theirs} line {number}"

        text = re.sub(rf"{re.escape(str(ours))} line (\d+)", translate, text)
        return [text, *(f"{theirs} {found}" for found in conf.suspects(conf.extra_of(rendered), text))]

    def _alive_or_fail(self, proc: Proc, name: str, *logs: str) -> None:
        if not proc.alive:
            raise self.failure(f"{name} ended at its start", *logs)

    def munged(self) -> None:
        """Start munged with a key of its own and wait for its socket."""
        key = self.layout.etc / "munge.key"
        fsio.write_atomic(key, os.urandom(1024), mode=0o400, sync=False)
        socket_path = self.at.munge_socket or "/run/munge/munge.socket.2"
        run = self.layout.run
        argv = [
            self.tools["munged"],
            "--foreground",
            f"--key-file={key}",
            f"--socket={socket_path}",
            f"--pid-file={run / 'munged.pid'}",
            f"--seed-file={run / 'munged.seed'}",
            f"--log-file={self.layout.log / 'munged.log'}",
        ]
        proc = self.host.spawn("munged", argv)
        seen = Path(socket_path) if self.at.munge_socket else Path(f"/proc/{proc.pid}/root{socket_path}")

        def serving() -> bool:
            self._alive_or_fail(proc, "munged", "munged.out", "munged.log")
            return seen.exists()

        wait_until("the socket of munged", serving, timeout_s=20.0)

    def slurmctld(self, *, first: bool = False) -> Proc:
        """Start slurmctld. ``first``: with an empty state."""
        argv = [self.tools["slurmctld"], "-D", "-f", str(self.layout.slurm_conf), *(["-c"] if first else [])]
        return self.host.spawn("slurmctld", argv)

    def slurmd(self, node: str) -> Proc:
        """Start a node and its slurmd, as after a boot."""
        argv = [self.tools["slurmd"], "-D", "-b", "-f", str(self.layout.slurm_conf), "-N", node]
        return self.host.start_node(node, argv)

    def accounting(self) -> None:
        """Start MariaDB and slurmdbd, and enter the cluster, an account and the users.

        Raises:
            ConfigError: One of them does not serve; quotes the log of the one at fault.
        """
        password = secrets.token_hex(16)
        init = self.layout.state / "db.sql"
        fsio.write_atomic(init, conf.database_sql(password).encode(), mode=0o600, sync=False)
        database = self._mariadbd(init)
        text = conf.slurmdbd_conf(self.layout, self.at, password)
        fsio.write_atomic(self.layout.etc / "slurmdbd.conf", text.encode(), mode=0o600, sync=False)
        dbd = self.host.spawn("slurmdbd", [self.tools["slurmdbd"], "-D"])
        sacctmgr = str(Path(self.tools["scontrol"]).with_name("sacctmgr"))
        dbd_logs = ("slurmdbd.log", "slurmdbd.out")
        said = ""

        def entered() -> bool:
            nonlocal said
            self._alive_or_fail(database, "mariadbd", "mariadbd.out")
            self._alive_or_fail(dbd, "slurmdbd", *dbd_logs)
            done = self.run([sacctmgr, "-i", "add", "cluster", "sandbox"], check=False)
            said = (done.stderr or done.stdout).strip()
            return done.returncode == 0

        add = [sacctmgr, "-i", "add"]
        users = "alice,bob,root" if self.at.private else self.at.user
        try:
            wait_until("an answer of slurmdbd", entered, timeout_s=60.0, poll_s=0.2)
            init.unlink()  # not earlier: MariaDB makes its socket before it reads this file
            self.run([*add, "account", "lab", "cluster=sandbox", "description=lab", "organization=lab"])
            self.run([*add, "user", users, "account=lab", "cluster=sandbox"])
        except ServiceError as error:
            what = "\n".join(filter(None, (str(error), said)))
            raise self.failure(what, *dbd_logs) from error

    def _mariadbd(self, init: Path) -> Proc:
        """Start MariaDB with an empty database directory and wait for its socket. ``init``: what it does first."""
        data = self.layout.state / "db"
        common = (
            "--no-defaults",
            f"--datadir={data}",
            f"--user={self.at.user}",
            "--skip-name-resolve",
            "--innodb-log-file-size=8M",
        )
        self.run(
            [
                self.tools["mariadb-install-db"],
                *common,
                "--skip-test-db",
                "--auth-root-authentication-method=socket",
                f"--auth-root-socket-user={self.at.user}",
            ],
            timeout_s=120.0,
        )
        socket_path = data / "db.sock"
        argv = [
            self.tools["mariadbd"],
            *common,
            f"--socket={socket_path}",
            f"--pid-file={self.layout.run / 'db.pid'}",
            f"--init-file={init}",
            "--bind-address=127.0.0.1",
            f"--port={self.at.db_port}",
            "--innodb-buffer-pool-size=64M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
        ]
        proc = self.host.spawn("mariadbd", argv)

        def serving() -> bool:
            self._alive_or_fail(proc, "mariadbd", "mariadbd.out")
            return socket_path.exists()

        try:
            wait_until("the socket of mariadbd", serving, timeout_s=60.0)
        except ServiceError as error:
            raise self.failure(str(error), "mariadbd.out") from error
        return proc

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node, such as ``idle`` or ``down*``; empty if unknown."""
        done = self.run(["sinfo", "-h", "-N", "-o", "%N %T"], timeout_s=20.0, check=False)
        if done.returncode != 0:
            return {}
        return dict(line.split(None, 1) for line in done.stdout.splitlines() if " " in line)

    def registered_since(self, node: str, since_s: float) -> bool:
        """Whether slurmctld has heard from a slurmd of this node that started at this Unix time or later."""
        done = self.run([self.tools["scontrol"], "show", "node", node, "-o"], timeout_s=20.0, check=False)
        match = re.search(r"\bSlurmdStartTime=(\S+)", done.stdout)
        if done.returncode != 0 or match is None:
            return False
        try:
            started = datetime.datetime.fromisoformat(match[1]).replace(tzinfo=datetime.UTC)
        except ValueError:  # "None": it never registered
            return False
        return started.timestamp() >= int(since_s)

    def wait_idle(self, controller: Proc, nodes: dict[str, Proc]) -> None:
        """Wait until all nodes are idle.

        Raises:
            ConfigError: A daemon ended, or they were not in time; quotes the log of the daemon at fault.
        """
        states: dict[str, str] = {}
        wanted = {name: "reserved" if name in self.spec.spare_names else "idle" for name in nodes}

        def waiting() -> list[str]:
            return [name for name in nodes if states.get(name) != wanted[name]]

        def idle() -> bool:
            nonlocal states
            self._alive_or_fail(controller, "slurmctld", "slurmctld.out", "slurmctld.log")
            for name, proc in nodes.items():
                self._alive_or_fail(proc, f"node {name}", f"{name}.out", f"slurmd-{name}.log")
            states = self.node_states()
            return not waiting()

        try:
            wait_until("all nodes idle", idle, timeout_s=self.spec.start_timeout_s, poll_s=0.1)
        except ServiceError as error:
            bad = waiting()
            logs = [f"slurmd-{bad[0]}.log", f"{bad[0]}.out"] if bad and states else []
            said = ", ".join(f"{name} {states.get(name, 'unknown')}" for name in bad)
            raise self.failure(f"{error}; {said}", *logs, "slurmctld.out", "slurmctld.log") from error

    def make_spares(self, controller: Proc) -> None:
        """Reserve the spare pool: nobody's jobs run there until a reservation that overlaps it lets one in."""
        if not self.spec.spares:
            return

        def answers() -> bool:
            self._alive_or_fail(controller, "slurmctld", "slurmctld.out", "slurmctld.log")
            return bool(self.node_states())

        try:
            wait_until("an answer of slurmctld", answers, timeout_s=self.spec.start_timeout_s, poll_s=0.1)
        except ServiceError as error:
            raise self.failure(str(error), "slurmctld.out", "slurmctld.log") from error
        self.run(
            [
                self.tools["scontrol"],
                "create",
                "reservation",
                "ReservationName=spares",
                f"Nodes={','.join(self.spec.spare_names)}",
                "Users=root",
                "StartTime=now",
                "Duration=UNLIMITED",
                "Flags=IGNORE_JOBS",
            ]
        )
