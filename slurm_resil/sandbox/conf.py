"""The sandbox's configuration files as text. Pure: the same input gives the same text; nothing is read or written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_resil.sandbox.spec import (
    CONTROLLER,
    CONTROLLER_ADDRESS,
    USERS,
    Layout,
    SandboxSpec,
    node_address,
)

Version = tuple[int, int]

EXTRA_MARK = "# --slurm-conf-extra"

_DATABASE = "slurm_acct"

_SCHEDULER = ",".join(
    (
        "sched_interval=2",
        "sched_min_interval=0",
        "batch_sched_delay=0",
        "bf_interval=2",
        "bf_max_job_test=1000",
        "bf_continue",
    )
)


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses and users that differ between a sandbox with namespaces and one without.

    Attributes:
        host: Name of the controller's host.
        address: Address that the controller answers on.
        slurmctld_port: Port of slurmctld.
        slurmdbd_port: Port of slurmdbd.
        db_port: Port of MariaDB on 127.0.0.1.
        node_ports: Port of each node's slurmd; empty where each node has an address of its own.
        user: User of all daemons.
        munge_socket: Socket of munged if it is not at its usual place.
        private: Each node has namespaces, and an address, of its own.
        loopback_only: This host's name resolves to ``address``, a loopback one: listen there and nowhere else.
    """

    host: str = CONTROLLER
    address: str = CONTROLLER_ADDRESS
    slurmctld_port: int = 6817
    slurmdbd_port: int = 6819
    db_port: int = 3306
    node_ports: tuple[int, ...] = ()
    user: str = "root"
    munge_socket: str = ""
    private: bool = True
    loopback_only: bool = False


def parse_version(text: str) -> Version:
    """Read the output of ``slurmctld -V``: ``slurm-wlm 22.05.8`` is (22, 5).

    Raises:
        ValueError: There is no version in it.
    """
    match = re.search(r"\b(\d{2})\.(\d{2})\b", text)
    if match is None:
        raise ValueError(f"no Slurm version in {text!r}")
    return int(match[1]), int(match[2])


def _lines(values: Mapping[str, object]) -> str:
    return "".join(f"{key}={value}\n" for key, value in values.items() if value != "")


def _keys(extra: str) -> set[str]:
    """What the lines of a slurm.conf set, lower case; a partition counts by its name."""
    found = set()
    for match in re.finditer(r"^[ \t]*(\w+)[ \t]*=[ \t]*(\S*)", extra, re.MULTILINE):
        key, value = match[1].lower(), match[2]
        found.add(f"{key}={value}" if key == "partitionname" else key)
    return found


def extra_line(text: str, number: int) -> int | None:
    """Which line of the extra file a line of slurm.conf is, both counted from 1; None if it is one of ours."""
    head, mark, _ = text.partition(EXTRA_MARK)
    first = head.count("\n") + 1
    return number - first if mark and number > first else None


def extra_of(text: str) -> str:
    """The extra lines of a slurm.conf."""
    return text.partition(f"{EXTRA_MARK}\n")[2]


def suspects(extra: str, said: str) -> list[str]:
    """Which lines of the extra file an error speaks of, as ``line N: TEXT``: it names their key or their value."""
    words = set(re.findall(r"[\w/]{3,}", said))
    found = []
    for number, line in enumerate(extra.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if words & set(re.findall(r"[\w/]{3,}", content)):
            found.append(f"line {number}: {content}")
    return found


def topology_plugin(text: str) -> str:
    """Which plugin a topology.conf is for; empty if there is none."""
    return f"topology/{'block' if re.search('^ *BlockName=', text, re.M | re.I) else 'tree'}" if text else ""


def slurm_conf(
    spec: SandboxSpec, layout: Layout, at: Endpoints, version: Version, extra: str = "", topology: str = ""
) -> str:
    """Render slurm.conf.

    Args:
        spec: What is asked for.
        layout: Where everything lies.
        at: Addresses, ports, user.
        version: Slurm's.
        extra: Lines that come last. What they set is left out above: Slurm's commands complain about a key given twice.
        topology: What is in topology.conf; empty: there is none.
    """
    theirs = _keys(extra)
    ctld_params = ["preempt_send_user_signal"] if spec.preempt_signal and version < (23, 2) else []
    values: dict[str, object] = {
        "ClusterName": "sandbox",
        "SlurmctldHost": f"{at.host}({at.address})",
        "SlurmctldPort": at.slurmctld_port,
        "SlurmUser": at.user,
        "SlurmdUser": at.user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={at.munge_socket}" if at.munge_socket else "",
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny" if at.loopback_only else "",
        "StateSaveLocation": layout.state / "slurmctld",
        "SlurmdSpoolDir": layout.spool / "%n",
        "SlurmctldPidFile": layout.run / "slurmctld.pid",
        "SlurmdPidFile": layout.run / "slurmd-%n.pid",
        "SlurmctldLogFile": layout.log / "slurmctld.log",
        "SlurmdLogFile": layout.log / "slurmd-%n.log",
        "PlugStackConfig": layout.etc / "plugstack.conf",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "ReturnToService": 2,
        "SlurmctldTimeout": 30,
        "SlurmdTimeout": 12,
        "KillWait": 8,
        "MinJobAge": 300,
        "InactiveLimit": 0,
        "TCPTimeout": 2,
        "OverTimeLimit": 0,
        "JobRequeue": 1,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": _SCHEDULER,
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "TopologyPlugin": topology_plugin(topology),
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "PreemptParameters": "send_user_signal" if spec.preempt_signal and version >= (23, 2) else "",
        "SlurmctldParameters": ",".join(ctld_params),
        "SlurmdParameters": "config_overrides",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        "Prolog": spec.prolog or "",
        "Epilog": spec.epilog or "",
    }
    if spec.accounting:
        values |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": at.address,
            "AccountingStoragePort": at.slurmdbd_port,
        }
    values = {key: value for key, value in values.items() if key.lower() not in theirs}
    text = "# written by `slurm-resil sandbox up`\n" + _lines(values) + _nodes(spec, at)
    everyone = "Nodes=ALL OverSubscribe=NO MaxTime=7-00:00:00 DefaultTime=1:00:00 State=UP"
    partitions = {
        "train": f"Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={spec.grace_time_s}",
        "urgent": "Default=NO PriorityTier=10 PreemptMode=OFF",
    }
    for name, own in partitions.items():
        if f"partitionname={name}" not in theirs:
            text += f"PartitionName={name} {everyone} {own}\n"
    if extra:
        text += f"{EXTRA_MARK}\n{extra.rstrip()}\n"
    return text


def _nodes(spec: SandboxSpec, at: Endpoints) -> str:
    common = f"CPUs={spec.cpus} RealMemory=1024 State=UNKNOWN"
    lines = []
    for index, name in enumerate(spec.node_names, start=1):
        if at.private:
            where = f"NodeHostname={name} NodeAddr={node_address(index)}"
        else:
            where = f"NodeHostname={at.host} NodeAddr={at.address} Port={at.node_ports[index - 1]}"
        lines.append(f"NodeName={name} {where} {common}\n")
    return "".join(lines)


def cgroup_conf(version: Version) -> str:
    """Render cgroup.conf: the sandbox uses no control groups, and where Slurm lets us say so we do."""
    if version >= (24, 11):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\n"


def plugstack_conf(plugins: tuple[str, ...]) -> str:
    """Render plugstack.conf: all plugins are optional, so that a wrong build breaks no command."""
    return "".join(f"optional {plugin}\n" for plugin in plugins)


def database_sql(password: str) -> str:
    """Render what MariaDB does before it serves: make slurmdbd's database and the user that slurmdbd comes as.

    slurmdbd can make its database itself, but it then goes on with the connection that was refused for want of one, and
    MariaDB's client library 3.4.10 (Debian 13) takes a result of any size for too large on such a connection.
    """
    return (
        f"CREATE DATABASE {_DATABASE};\n"
        f"CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON *.* TO 'slurm'@'127.0.0.1';\n"
    )


def slurmdbd_conf(layout: Layout, at: Endpoints, password: str) -> str:
    """Render slurmdbd.conf."""
    return _lines(
        {
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={at.munge_socket}" if at.munge_socket else "",
            "DbdHost": at.host,
            "DbdAddr": at.address,
            "DbdPort": at.slurmdbd_port,
            "SlurmUser": at.user,
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "127.0.0.1",
            "StoragePort": at.db_port,
            "StorageUser": "slurm",
            "StoragePass": password,
            "StorageLoc": _DATABASE,
            "PidFile": layout.run / "slurmdbd.pid",
            "LogFile": layout.log / "slurmdbd.log",
        }
    )


def passwd(system: str, layout: Layout) -> str:
    """The system's passwd with the sandbox's users; a system's user of the same name is replaced."""
    ours = {user.name for user in USERS}
    kept = [line for line in system.splitlines() if line and line.partition(":")[0] not in ours]
    added = [f"{user.name}:x:{user.uid}:{user.uid}::{layout.home / user.name}:/bin/bash" for user in USERS]
    return "\n".join((*kept, *added)) + "\n"


def group(system: str) -> str:
    """The system's group file with one group for each of the sandbox's users."""
    ours = {user.name for user in USERS}
    kept = [line for line in system.splitlines() if line and line.partition(":")[0] not in ours]
    return "\n".join((*kept, *(f"{user.name}:x:{user.uid}:" for user in USERS))) + "\n"


def hosts(spec: SandboxSpec) -> str:
    """The sandbox's hosts file: the controller and all nodes."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{CONTROLLER_ADDRESS} {CONTROLLER}"]
    lines += [f"{node_address(index)} {name}" for index, name in enumerate(spec.node_names, start=1)]
    return "\n".join(lines) + "\n"
