"""``slurm-resil doctor``: what works here, and the mend for what does not. Changes nothing.

Each check runs in a thread of its own, all at the same time and with one time limit: a file server or a daemon that
hangs is ``unknown``, whoever asks it, and the rest is still told.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click

from slurm_resil.cli.protection import nodes_option
from slurm_resil.core import config, control, errors, units
from slurm_resil.core.errors import ResilError, ServiceError
from slurm_resil.core.settings import Settings
from slurm_resil.drain.hints import file_system
from slurm_resil.launch.protect import describe
from slurm_resil.slurm.job import nodes_of
from slurm_resil.slurm.ping import reachable
from slurm_resil.slurm.scontrol import Commands

OK, BAD, UNKNOWN = "ok", "bad", "unknown"
LIMIT_S = 25.0
_GIB = 1 << 30
_LOCAL = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found.

    Attributes:
        check: Its name.
        result: ``ok``, ``bad`` or ``unknown``.
        found: What was seen.
        mend: What to do about it; empty if nothing is to be done.
    """

    check: str
    result: str
    found: str
    mend: str = ""


Answer = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Here:
    """What the checks look at.

    Attributes:
        env: Environment.
        site: The site's configuration.
        settings: What a job of this user would get.
        commands: Runs commands.
        nodes: Nodes that somebody asks about; empty: those that a job would get.
    """

    env: Mapping[str, str]
    site: config.Site
    settings: Settings
    commands: Commands
    nodes: tuple[str, ...] = ()


def _slurm(here: Here) -> Answer:
    path = here.env.get("PATH", os.defpath)
    missing = [name for name in ("sbatch", "srun", "scontrol", "squeue") if not shutil.which(name, path=path)]
    if missing:
        return BAD, f"{', '.join(missing)} not found", "put Slurm's commands on PATH; without Slurm use run --local"
    said = here.commands.run("scontrol", "--version").strip()
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None:
        return UNKNOWN, f"scontrol --version said {said!r}", ""
    if (int(version[1]), int(version[2])) < (22, 5):
        return BAD, said, "22.05 is the oldest release that was tried"
    return OK, said, ""


def _slurmctld(here: Here) -> Answer:
    said = here.commands.run("scontrol", "ping").strip()
    if re.search(r"\bUP\b", said):
        return OK, said.splitlines()[0], ""
    return BAD, said, "start slurmctld, or look into its log"


def _munge(here: Here) -> Answer:
    from slurm_resil.comm.munge import socket_path

    path = socket_path(here.env)
    argv = ("munge", "--no-input", "--socket", path) if path else ("munge", "--no-input")
    try:
        made = here.commands.run(*argv)
    except ServiceError as error:
        error.mend = "start munged"  # what Slurm's commands would need is of no use
        raise
    if not made.startswith("MUNGE:"):
        return BAD, "munge made no credential", "start munged with the cluster's key"
    return OK, path or "its usual socket", ""


def _import(here: Here, name: str, extra: str, code: str) -> Answer:
    try:
        return OK, here.commands.run(sys.executable, "-c", code).strip(), ""
    except ServiceError as error:
        if "did not answer" in error.message:
            raise
        last = error.message.splitlines()[-1]
        return BAD, f"{name}: {last}", f"install it in this environment: pip install 'slurm-resil{extra}'"


def _mpi(here: Here) -> Answer:
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].rstrip(chr(0)))"
    return _import(here, "mpi4py", "[mpi]", code)


def _mpiexec(here: Here) -> Answer:
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec", path=here.env.get("PATH", os.defpath))
    if found is None:
        return BAD, "mpiexec not found", "pip install 'slurm-resil[mpi]'; only `run --local` and `bench drain` need it"
    return OK, found, ""


def _h5py(here: Here) -> Answer:
    code = "import h5py; print(h5py.__version__, 'HDF5', h5py.version.hdf5_version)"
    return _import(here, "h5py", "", code)


def _torch(here: Here) -> Answer:
    return _import(
        here, "torch", "[torch]", "import torch; print(torch.__version__, torch.cuda.device_count(), 'GPUs')"
    )


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _space(path: str) -> tuple[int, str]:
    info = os.statvfs(path)
    free = info.f_bavail * info.f_frsize
    return free, f"{path}: {file_system(path) or 'unknown file system'}, {free / _GIB:.1f} GiB free"


def _burst_buffer(here: Here) -> Answer:
    root = here.settings.bb_root.value
    place = _existing(root)
    free, found = _space(place)
    if here.site.burst_buffer.root == root:
        if place != root:
            return BAD, f"{root} does not exist", f"as root: mkdir -m 755 {root} on every node"
        info = os.stat(root)
        if info.st_uid != 0 or stat.S_IMODE(info.st_mode) & 0o022:
            mode = stat.S_IMODE(info.st_mode)
            return BAD, f"{root} is uid {info.st_uid}'s, mode {mode:o}", f"chown root {root}; chmod 755 {root}"
    elif not os.access(place, os.W_OK | os.X_OK):
        return BAD, f"{place} is not writable", "set SLURM_RESIL_BB_ROOT to a node-local directory that is"
    if free < _GIB:
        return BAD, found, "make room: it must hold three copies of each rank's state on the node"
    return OK, found, ""


def _prefix(here: Here) -> Answer:
    root = here.settings.prefix_root.value
    place = _existing(root)
    free, found = _space(place)
    mend = "set SLURM_RESIL_PREFIX or [prefix] root to a directory on the parallel file system"
    if not os.access(place, os.W_OK | os.X_OK):
        return BAD, f"{place} is not writable", mend
    if file_system(place) in _LOCAL:
        return BAD, f"{found}; other nodes do not see it", mend
    if free < _GIB:
        return BAD, found, "make room, or set another prefix"
    return OK, found, ""


def _memlock(here: Here) -> Answer:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return OK, "unlimited", ""
    found = f"{soft / (1 << 20):.0f} MiB"
    if soft >= _GIB:
        return OK, found, ""
    return BAD, found, "LimitMEMLOCK=infinity in slurmd's unit, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"


def _membarrier(here: Here) -> Answer:
    control.membarrier()
    return OK, "available", ""


def _spank(here: Here) -> Answer:
    if "--resil-every" in here.commands.run("sbatch", "--help"):
        return OK, "sbatch knows --resil", ""
    mend = "make -C spank, and an `optional` line in plugstack.conf (site render); without it leave out --resil"
    return BAD, "sbatch does not know --resil", mend


def _policy(here: Here) -> Answer:
    found = here.commands.config()
    if not {"JobRequeue", "PreemptMode", "KillWait"} <= set(found):
        return UNKNOWN, "scontrol show config says too little", ""
    mode, wait = found["PreemptMode"], re.match(r"\d+", found["KillWait"])
    mends = []
    if found["JobRequeue"] == "0":
        mends.append("JobRequeue=1 in slurm.conf, or --requeue for each job")
    if "CANCEL" in mode:
        mends.append("PreemptMode=REQUEUE: Slurm never requeues what it cancels")
    if wait is not None and int(wait[0]) < 5:
        mends.append("KillWait=30: nothing can be saved in so short a time")
    words = f"JobRequeue={found['JobRequeue']} PreemptMode={mode} KillWait={wait[0] if wait else found['KillWait']}"
    return BAD if mends else OK, words, "; ".join(mends)


def _redundancy(here: Here) -> Answer:
    """What protection a job gets on the nodes that were named, else the job's own, else all of the cluster."""
    if not here.settings.redundancy.value.protects:
        return OK, "; ".join(describe(here.settings, here.site, (), None).words), ""
    nodes = here.nodes or nodes_of(here.env.get("SLURM_JOB_NODELIST", "")) or here.commands.nodes()
    partition = here.env.get("SLURM_JOB_PARTITION", "")
    said = describe(here.settings, here.site, nodes, here.commands, partition=partition)
    found = f"on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}: {'; '.join(said.words)}"
    if said.unknown:
        mend = "see [redundancy] failure_groups in site.toml; until then sets are made as if every node failed alone"
        return UNKNOWN, f"{found}; which nodes fail together is not known: {'; '.join(said.unknown)}", mend
    return OK, found, "; ".join(said.warnings)


def _engine(here: Here) -> Answer:
    address = here.settings.engine.value
    if not address:
        return OK, "none: a job requeues itself", ""
    host, port = units.host_port(address)
    if reachable(host, port):
        return OK, f"{address} answers", ""
    return BAD, f"{address} does not answer", "start it: slurm-resil engine run, or the unit of `site render`"


CHECKS: dict[str, Callable[[Here], Answer]] = {
    "slurm": _slurm,
    "slurmctld": _slurmctld,
    "requeue": _policy,
    "spank": _spank,
    "munge": _munge,
    "engine": _engine,
    "redundancy": _redundancy,
    "burst_buffer": _burst_buffer,
    "prefix": _prefix,
    "memlock": _memlock,
    "membarrier": _membarrier,
    "mpi": _mpi,
    "mpiexec": _mpiexec,
    "h5py": _h5py,
    "torch": _torch,
}


_SLURM_CONF = "put slurm.conf where Slurm looks for it, or set SLURM_CONF; see that slurmctld runs"
# what may help where nothing could be found out
_ASK = dict.fromkeys(("slurm", "slurmctld", "requeue", "spank"), _SLURM_CONF)


def examine(here: Here, checks: Mapping[str, Callable[[Here], Answer]], *, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run checks beside each other, all of them together for a limited time."""
    end = time.monotonic() + limit_s
    running = {name: _start(name, check, here) for name, check in checks.items()}
    findings = []
    for name, (thread, answers) in running.items():
        thread.join(max(0.0, end - time.monotonic()))
        findings.append(_found(name, answers, limit_s))
    return findings


def _start(name: str, check: Callable[[Here], Answer], here: Here) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []

    def body() -> None:
        try:
            answers.append(check(here))
        except ServiceError as error:
            answers.append((UNKNOWN, error.message, error.mend))
        except ResilError as error:
            answers.append((BAD, error.message, error.mend))
        except Exception as error:  # noqa: BLE001 - top of a thread: the other checks go on
            answers.append((UNKNOWN, f"{type(error).__name__}: {error}", ""))

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread, answers


def _found(name: str, answers: list[Answer], limit_s: float) -> Finding:
    if not answers:
        return Finding(check=name, result=UNKNOWN, found=f"no answer in {limit_s:g} s")
    result, found, mend = answers[0]
    mend = mend or (_ASK.get(name, "") if result == UNKNOWN else "")
    return Finding(check=name, result=result, found=found.strip().splitlines()[-1] if found.strip() else "", mend=mend)


@click.command()
@click.option("--site", "path", metavar="FILE", help="The site's configuration.")
@click.option("--only", multiple=True, type=click.Choice(list(CHECKS)), help="Only this check; repeatable.")
@nodes_option("Say how a job on these nodes is protected. Default: those of this job, or all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(path: str | None, only: tuple[str, ...], nodes: tuple[str, ...], as_json: bool) -> None:
    """Look at what is needed here, and say what to do about what is missing.

    Ends with 0, with 1 if something is bad, with 69 if nothing is bad but something is unknown.
    """
    site = config.load(os.environ, path)
    settings = Settings.from_env(os.environ, site)
    here = Here(env=os.environ, site=site, settings=settings, commands=Commands(os.environ), nodes=nodes)
    findings = examine(here, {name: check for name, check in CHECKS.items() if not only or name in only})
    if as_json:
        click.echo(json.dumps({"checks": [vars(finding) for finding in findings]}))
    else:
        for finding in findings:
            click.echo(f"{finding.result:<8} {finding.check:<13} {finding.found}")
            if finding.mend:
                click.echo(f"{'':<22} mend: {finding.mend}")
    results = {finding.result for finding in findings}
    sys.exit(errors.EXIT_FAILED if BAD in results else errors.EXIT_NO_SERVICE if UNKNOWN in results else errors.EXIT_OK)
