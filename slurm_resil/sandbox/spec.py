"""What a sandbox is asked to be, and where its parts lie. Nothing here changes the system."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from slurm_resil.core.errors import ConfigError

DEFAULT_DIR = "/tmp/slurm-resil-sandbox"  # noqa: S108 - created with O_EXCL semantics, refused if somebody else's
DIR_ENV = "SLURM_RESIL_SANDBOX"
CONTROLLER = "ctl"
MAX_NODES = 200
MARKER = ".slurm-resil-sandbox"

_SAFE_PATH = re.compile(r"/[A-Za-z0-9._/+-]*")
_HIDDEN = ("/run", "/var/run", "/dev", "/proc", "/sys")
_SOCKET_PATH_MAX_BYTES = 107


@dataclass(frozen=True, kw_only=True)
class User:
    """A user of the sandbox only; the system's own accounts stay as they are."""

    name: str
    uid: int


USERS = (User(name="alice", uid=20001), User(name="bob", uid=20002))


def default_dir() -> Path:
    """The directory that commands use without ``--dir``."""
    return Path(os.environ.get(DIR_ENV) or DEFAULT_DIR)


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """A sandbox as it is asked for.

    Attributes:
        dir: The one directory; absent or empty before ``up``.
        nodes: Number of compute nodes, the spares included.
        cpus: CPUs that Slurm believes each node has.
        spares: The last so many nodes are kept by the reservation ``spares``.
        accounting: Run slurmdbd with a MariaDB of its own.
        bb_bytes: Size limit of each node's burst buffer, and of its ``/dev/shm``.
        grace_time_s: GraceTime of the preemptable partition ``train``.
        preempt_signal: Preemption sends the signal that the job named with ``--signal``.
        prolog: Program for ``Prolog``.
        epilog: Program for ``Epilog``.
        slurm_conf_extra: File whose lines come last in slurm.conf.
        topology: A topology.conf, for topology/tree or topology/block.
        spank: SPANK plugins, each ``FILE [ARGS]``.
        rootless: Run without namespaces even as root.
        start_timeout_s: How long all nodes may take to become idle.
    """

    dir: Path = field(default_factory=default_dir)
    nodes: int = 4
    cpus: int = 4
    spares: int = 0
    accounting: bool = False
    bb_bytes: int = 2 << 30
    grace_time_s: int = 20
    preempt_signal: bool = True
    prolog: Path | None = None
    epilog: Path | None = None
    slurm_conf_extra: Path | None = None
    topology: Path | None = None
    spank: tuple[str, ...] = ()
    rootless: bool = False
    start_timeout_s: float = 60.0

    def validated(self) -> SandboxSpec:
        """Check everything that can be checked without starting anything.

        Raises:
            ConfigError: With all faults at once.
        """
        faults = [*_dir_faults(self.dir, rootless=self.rootless)]
        if not 1 <= self.nodes <= MAX_NODES:
            faults.append(f"nodes is {self.nodes}: 1 to {MAX_NODES} are possible")
        if not 1 <= self.cpus <= 1024:
            faults.append(f"cpus is {self.cpus}: 1 to 1024 are possible")
        if not 0 <= self.spares < max(self.nodes, 1):
            faults.append(f"spares is {self.spares}: at least one of the {self.nodes} nodes must not be a spare")
        if self.bb_bytes < 1 << 20:
            faults.append(f"the burst buffer size is {self.bb_bytes} bytes: at least 1M is needed")
        if not 0 <= self.grace_time_s <= 86400:
            faults.append(f"the grace time is {self.grace_time_s} s: 0 to 86400 are possible")
        for name, path in (("prolog", self.prolog), ("epilog", self.epilog)):
            if path is not None and not (path.is_absolute() and os.access(path, os.X_OK) and path.is_file()):
                faults.append(f"{name} {path} is not an executable file with an absolute path")
        for name, path in (("slurm.conf", self.slurm_conf_extra), ("topology.conf", self.topology)):
            if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
                faults.append(f"the file for {name} {path} cannot be read")
        for entry in self.spank:
            words = entry.split()
            if not words or not os.path.isfile(words[0]):
                faults.append(f"the SPANK plugin {words[0] if words else '(empty)'} is not a file")
        if faults:
            raise ConfigError("this sandbox cannot be started", faults=tuple(faults))
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes, in order: ``node1`` and so on."""
        return tuple(f"node{index}" for index in range(1, self.nodes + 1))

    @property
    def spare_names(self) -> tuple[str, ...]:
        """Names of the nodes in the spare pool."""
        return self.node_names[self.nodes - self.spares :]


def node_address(index: int) -> str:
    """Address of the node with this index (1 and up) on the sandbox's bridge."""
    return f"10.87.0.{index + 10}"


CONTROLLER_ADDRESS = "10.87.0.1"


def _dir_faults(path: Path, *, rootless: bool) -> list[str]:
    text = os.fspath(path)
    if not _SAFE_PATH.fullmatch(text) or ".." in path.parts:
        return [f"the directory {text!r} must be absolute, of letters, digits and . _ + - only: Slurm splits the rest"]
    faults = []
    if not rootless and any(text == hidden or text.startswith(hidden + "/") for hidden in _HIDDEN):
        faults.append(f"the directory {text} lies where each node has a file system of its own; take one under /tmp")
    longest = len(f"{text}/spool/node{MAX_NODES}/node{MAX_NODES}_4294967295.4294967295")
    if longest > _SOCKET_PATH_MAX_BYTES:
        over = longest - _SOCKET_PATH_MAX_BYTES
        faults.append(f"the directory {text} is {over} characters too long for Unix sockets below it")
    for parent in (path, *path.parents):
        try:
            mode = parent.stat().st_mode
        except OSError:
            continue
        if parent != path and not mode & 0o001:
            faults.append(f"the users of the sandbox cannot reach {text}: {parent} lacks execute permission for others")
    return faults


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every path below the sandbox's directory."""

    dir: Path

    @property
    def marker(self) -> Path:
        """Its presence means that the directory is a sandbox's; locked during ``up``, ``down`` and faults."""
        return self.dir / MARKER

    @property
    def info(self) -> Path:
        """What was asked for and found at ``up``, JSON."""
        return self.dir / "sandbox.json"

    @property
    def keeper(self) -> Path:
        """Which process keeps the sandbox, JSON."""
        return self.dir / "keeper.json"

    @property
    def procs(self) -> Path:
        """One JSON file per process that the sandbox started."""
        return self.dir / "procs"

    @property
    def etc(self) -> Path:
        """slurm.conf and what goes with it; munge's key; the private passwd, group and hosts."""
        return self.dir / "etc"

    @property
    def slurm_conf(self) -> Path:
        """The configuration that all daemons and commands use."""
        return self.etc / "slurm.conf"

    @property
    def log(self) -> Path:
        """Logs of all daemons."""
        return self.dir / "log"

    @property
    def run(self) -> Path:
        """Pid files and sockets."""
        return self.dir / "run"

    @property
    def state(self) -> Path:
        """State of slurmctld; data of MariaDB."""
        return self.dir / "state"

    @property
    def spool(self) -> Path:
        """SlurmdSpoolDir, one per node."""
        return self.dir / "spool"

    @property
    def home(self) -> Path:
        """Home directories."""
        return self.dir / "home"

    @property
    def pfs(self) -> Path:
        """The shared directory that plays the parallel file system."""
        return self.dir / "pfs"

    @property
    def bb(self) -> Path:
        """Mount point of each node's private burst buffer."""
        return self.dir / "bb"
