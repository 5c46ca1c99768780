"""The one place that runs Slurm's commands: argv, found once, time limit, C locale, errors told apart.

A failed or partial answer is never an empty one: it raises, and whoever asked takes no action.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping

from ClusterShell.NodeSet import NodeSet

from slurm_resil.core.errors import ConfigError, NoSuchJobError, NotPermittedError, ServiceError
from slurm_resil.slurm.job import FORMAT, JobRecord, nodes_of, read_job

TIMEOUT_S = 20.0
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z/:]*)=(.*?)(?=\s[A-Za-z][A-Za-z/:]*=|$)")
_NODE_TEXT = re.compile(r"\s(Reason|Comment|Extra)=(.*)", re.DOTALL)
_MEND = "`scontrol ping` says whether slurmctld runs, SLURM_CONF where slurm.conf is"
# what commands say that end well although they have failed: squeue leaves out a column that it does not know
_FAILED = ("Invalid job format specification", "slurm_load_topo error")
_REFUSED = (
    "access/permission denied",
    "invalid user id",
    "requested operation is presently disabled",
    "batch job",
    "only batch jobs",
)


def fields(line: str) -> dict[str, str]:
    """Read a line of ``scontrol -o``.

    Of a node, everything up to the first text that an administrator writes (reason, comment) is Slurm's own word, and
    the rest is that text: it cannot pass for a field. Of a job that cannot be told (see :mod:`slurm_resil.slurm.job`):
    whoever decides anything about somebody else's job asks :meth:`Commands.job`.
    """
    found: dict[str, str] = {}
    line = line.strip()
    free = _NODE_TEXT.search(line) if line.startswith("NodeName=") else None
    for match in _FIELD.finditer(line[: free.start()] if free else line):
        found.setdefault(match[1], match[2].strip())
    if free:
        found[free[1]] = free[2]
    return found


def host_list(names: Iterable[str]) -> str:
    """Write names in short: the kernel takes no argument of more than 128 KiB, which is fewer than 16,000 nodes."""
    found = NodeSet.fromlist(list(names))
    found.fold_axis = (-1,)  # Slurm reads one bracket in a name everywhere
    return str(found)


class Commands:
    """Runs Slurm's commands; times in their output are Unix seconds.

    Args:
        env: Environment of the commands.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        # what a person has set to have squeue leave jobs out would make them look as if they were gone, and scontrol
        # can be told to cut lines off
        plain = {name: value for name, value in env.items() if not name.startswith(("SQUEUE_", "SLURM_TOPO_LEN"))}
        self._env = {**plain, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self.count = 0

    def run(self, *argv: str) -> str:
        """Run one command and return its output.

        Raises:
            ConfigError: There is no such command.
            NotPermittedError: Slurm refuses, and will again.
            ServiceError: Slurm does not answer, or fails; nothing may be concluded.
        """
        program = shutil.which(argv[0], path=self._env.get("PATH", os.defpath))
        if program is None:
            raise ConfigError(f"{argv[0]} is not found", mend="put Slurm's commands on PATH")
        conf = self._env.get("SLURM_CONF")
        if conf and not os.path.exists(conf):
            # Slurm's commands would look for it, and for a server of configurations, for a long time
            raise ConfigError(f"SLURM_CONF={conf} does not exist", mend="name slurm.conf, or unset it")
        self.count += 1
        # Slurm's kill sends SIGTERM to every process of the batch step, and the update that follows a requeue must go
        # on: the command inherits the mask of this thread
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            raise ServiceError(f"{argv[0]} cannot be started: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{argv[0]} did not answer in {TIMEOUT_S:g} s", mend=_MEND) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if done.returncode != 0 or any(text in done.stderr for text in _FAILED):
            words = (done.stderr or done.stdout).strip() or f"{argv[0]} ended with code {done.returncode}"
            if "invalid job id" in words.lower():
                raise NoSuchJobError(f"Slurm knows no such job, or not any more: {words}", mend="squeue lists the jobs")
            if any(text in words.lower() for text in _REFUSED):
                raise NotPermittedError(words)
            raise ServiceError(words, mend=_MEND)
        return done.stdout

    def show(self, kind: str, name: str) -> dict[str, str]:
        """Fields of one job, node or partition.

        Raises:
            ServiceError: See :meth:`run`; also when the answer is about nothing.
        """
        found = fields(self.run("scontrol", "-o", "show", kind, name))
        if not found:
            raise ServiceError(f"scontrol said nothing about {kind} {name}")
        return found

    def job(self, job_id: int) -> JobRecord:
        """One job, in nothing of which its owner has a say.

        Raises:
            ServiceError: See :meth:`run`; also when the answer is not understood.
            NotPermittedError: Slurm has no such job, or none any more.
        """
        wanted = ("--jobs", str(job_id), "--states=all", "--all", "--local")
        return read_job(self.run("squeue", "--noheader", *wanted, "--Format", FORMAT), job_id)

    def text(self, job_id: int, code: str) -> str:
        """What squeue has about a job, as it is: its owner may have written it.

        Args:
            job_id: Job.
            code: Field of ``squeue --format``, such as ``%Z`` for its working directory.

        Raises:
            ServiceError: See :meth:`job`.
            NotPermittedError: Slurm has no such job, or none any more.
        """
        wanted = ("--jobs", str(job_id), "--states=all", "--all", "--local")
        for line in self.run("squeue", "--noheader", *wanted, "--format", f"%A|{code}").splitlines():
            number, _, words = line.partition("|")
            if number == str(job_id):
                return words
        raise ServiceError(f"squeue said nothing about job {job_id}", job=job_id)

    def config(self) -> dict[str, str]:
        """Slurm's configuration as slurmctld has it.

        Raises:
            ServiceError: See :meth:`run`.
        """
        said = self.run("scontrol", "show", "config")
        return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", said, re.MULTILINE))

    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes of the cluster.

        Raises:
            ServiceError: See :meth:`run`; also when there is none.
        """
        lines = self.run("scontrol", "-o", "show", "node").splitlines()
        found = tuple(name for line in lines if (name := fields(line).get("NodeName")))
        if not found:
            raise ServiceError("scontrol show node says nothing")
        return found

    def slurmds(self, names: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Address and port of the slurmd of each node.

        Raises:
            ServiceError: See :meth:`run`; also when a node's cannot be told.
        """
        names, found, usual = list(names), {}, ""
        for line in self.run("scontrol", "-o", "show", "node", host_list(names)).splitlines():
            node = fields(line)
            port = node.get("Port") or usual  # said only if it is not the cluster's
            if not port:
                port = usual = self.config().get("SlurmdPort", "")
            if port.isdigit() and node.get("NodeAddr"):
                found[node["NodeName"]] = (node["NodeAddr"], int(port))
        for name in names:
            if name not in found:
                raise ServiceError(f"where the slurmd of node {name} listens cannot be told", node=name)
        return found

    def excluded(self, job_id: int) -> tuple[str, ...]:
        """Nodes that a job does not want.

        Raises:
            ServiceError: See :meth:`job`.
        """
        return nodes_of(self.text(job_id, "%x").strip())
