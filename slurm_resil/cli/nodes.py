"""The burst buffers of all nodes of a job, asked from wherever the user is: one small Slurm step of the user's own.

A login node sees neither the nodes' burst buffers nor needs root for them: Slurm lets a user start a step in a job of
his own from anywhere (``srun --jobid --overlap``). Which job it is, on which nodes and with which directory, its
launcher has written down in the run's directory; without a launcher the environment inside of the job says it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ClusterShell.NodeSet import NodeSet

from slurm_resil.agent.place import from_env
from slurm_resil.cli.job import run_dir_of as of_job
from slurm_resil.cli.look import NodeView, look, told
from slurm_resil.cli.places import there as directory_there
from slurm_resil.core import paths
from slurm_resil.core.errors import ConfigError, ResilError, ServiceError, UsageError
from slurm_resil.core.layout import load as load_layout
from slurm_resil.launch import records
from slurm_resil.launch.commands import clean, step
from slurm_resil.slurm.scontrol import Commands, fields, host_list

LOOK_S = 45.0
_END_S = 5.0  # for srun to end its step
_GOES_ON = ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED")
_DEAD = ("DOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "FUTURE", "REBOOT")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A job that runs.

    Attributes:
        job_id: Slurm's number.
        nodes: All of its nodes.
        job_dir: Its directory in each node's burst buffer.
    """

    job_id: int
    nodes: tuple[str, ...]
    job_dir: str


@dataclass(kw_only=True)
class Asked:
    """What came of asking.

    Attributes:
        views: What was told, by node.
        unseen: Nodes that hold, or may hold, something and were not seen, and why.
        why: Why no node was asked; empty if some were, or if there is nothing to ask.
        job_id: Job that runs; None if none is known to.
        goes_on: Whether the job is not over: what its launcher has written down of its nodes still holds.
        told: Whether the nodes have told what they hold themselves, with all that they were asked.
    """

    views: dict[str, NodeView] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    why: str = ""
    job_id: int | None = None
    goes_on: bool = False
    told: bool = False

    @property
    def everywhere(self) -> bool:
        """Whether all nodes of a job that runs were seen."""
        return self.job_id is not None and not self.unseen


def this_node() -> str:
    """Name of this node."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def run_dir_of(job_id: int | None, run_dir: str | None) -> str | None:
    """Run's directory as it was given, else that of the job; None if neither was named.

    Raises:
        ResilError: There is no such job, or its run has no directory where one would be.
    """
    if job_id is None or run_dir is not None:
        return run_dir
    return of_job(Commands(os.environ), job_id, None)


def find(run_dir: str, job_dir: str | None, env: Mapping[str, str], job_id: int | None = None) -> Target | Asked:
    """Find the job of a run that is on nodes now.

    Args:
        run_dir: Run's directory.
        job_dir: Job's directory on each node; None: as its launcher has written down, or the usual one.
        env: Environment.
        job_id: A job of the run; None: that of the newest attempt, or the one that we are in.

    Returns:
        It, or why there is none that can be asked.
    """
    newest = records.newest(run_dir)
    inside = env.get("SLURM_JOB_ID", "")
    if newest is not None and newest.local and job_id is None:
        return Asked()
    if job_id is None and newest is None and not (inside.isdecimal() and job_dir):
        return Asked()
    job_id = job_id or (newest.job_id if newest is not None else int(inside))
    known = newest if newest is not None and newest.job_id == job_id else None
    there = known.nodes if known is not None else ()
    where = job_dir or (known.job_dir if known is not None else None) or _usual(job_id, env)
    if shutil.which("squeue") is None:
        return _nobody(there, "Slurm's commands are not on PATH")
    try:
        job = Commands(env).job(job_id)
    except ServiceError as error:
        return _nobody(there, f"Slurm does not say where job {job_id} runs: {error.message}")
    except ResilError:
        return _over(run_dir, there, f"job {job_id} is over")
    goes_on = job.state in _GOES_ON
    if not goes_on:
        return _over(run_dir, there, f"job {job_id} is {job.state}")
    if job.state != "RUNNING":
        return _nobody(there, f"job {job_id} is {job.state}", goes_on=True)
    if job.uid != os.geteuid():
        why = f"job {job_id} belongs to uid {job.uid}: only its owner can look at its nodes"
        return _nobody(job.nodes, why, goes_on=goes_on)
    return Target(job_id=job_id, nodes=job.nodes, job_dir=where)


def _nobody(nodes: Sequence[str], why: str, *, goes_on: bool = False) -> Asked:
    return Asked(unseen=dict.fromkeys(nodes, why), why=why, goes_on=goes_on)


def _over(run_dir: str, nodes: Sequence[str], why: str) -> Asked:
    """The job has ended: its nodes hold nothing that is nowhere else, or what they keep cannot be seen."""
    levels = records.levels(run_dir)
    if levels is not None and levels.local <= levels.durable:
        return Asked()
    last = f", and iteration {levels.local} was not durable yet" if levels is not None else ""
    return _nobody(nodes, f"{why}{last}")


def _usual(job_id: int, env: Mapping[str, str]) -> str:
    """Where a job has its directory if nothing is said of it."""
    return paths.job_dir(os.path.dirname(from_env({**env, "SLURM_JOB_ID": str(job_id)}).job_dir), job_id)


def survey(
    run_dir: str,
    job_dir: str | None,
    env: Mapping[str, str],
    *,
    job_id: int | None = None,
    here: bool = False,
    arguments: Sequence[str] = (),
    timeout_s: float | None = LOOK_S,
) -> Asked:
    """Ask all nodes of the run's job; without one, look at this node's directory if it is there.

    Args:
        run_dir: Run's directory on the parallel file system.
        job_dir: Job's directory in the burst buffer; None if nobody named one.
        env: Environment.
        job_id: See :func:`find`.
        here: Only this node.
        arguments: More for ``ckpt here``.
        timeout_s: Longest time; None for as long as it takes.
    """
    found = Asked() if here else find(run_dir, job_dir, env, job_id)
    if isinstance(found, Target):
        if list(found.nodes) == [this_node()]:
            return Asked(views={this_node(): look(found.job_dir, this_node())}, job_id=found.job_id, goes_on=True)
        return _ask(found, run_dir, env, arguments, timeout_s)
    newest = records.newest(run_dir)
    if job_dir is None and newest is not None:
        job_dir = newest.job_dir
    if job_dir and os.path.lexists(job_dir):
        found.views[this_node()] = look(job_dir, this_node())
        found.unseen.pop(this_node(), None)
    return found


def _ask(
    target: Target, run_dir: str, env: Mapping[str, str], arguments: Sequence[str], timeout_s: float | None
) -> Asked:
    """Ask nodes by a step; those that Slurm knows to be gone are not asked."""
    asked = Asked(job_id=target.job_id, goes_on=True, told=True)
    srun = shutil.which("srun")
    if srun is None:
        return Asked(unseen=dict.fromkeys(target.nodes, "srun is not on PATH"), job_id=target.job_id, goes_on=True)
    with contextlib.suppress(ResilError):
        asked.unseen.update(_dead(target.nodes, env))
    nodes = [node for node in target.nodes if node not in asked.unseen]
    if not nodes:
        return asked
    program = [sys.executable, "-m", "slurm_resil", "ckpt", "here", "--run-dir", run_dir, "--job-dir", target.job_dir]
    argv = [*step(srun, nodes, "resil-look"), f"--jobid={target.job_id}"]
    argv += ["--kill-on-bad-exit=0", "--no-kill", "--mpi=none", "--gres=none", *program, *arguments]
    out, words = _run(argv, clean(env, keep_gpus=False), timeout_s)
    views = told(out)
    for node in nodes:
        if node in views:
            asked.views[node] = views[node]
        else:
            asked.unseen[node] = words or "it told nothing"
    return asked


def _dead(nodes: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Nodes that Slurm has given up, and its word for it."""
    found = {}
    for line in Commands(env).run("scontrol", "-o", "show", "node", host_list(nodes)).splitlines():
        node = fields(line)
        state = node.get("State", "")
        if state.rstrip("+").endswith("*") or set(state.replace("*", "").split("+")) & set(_DEAD):
            found[node["NodeName"]] = f"the node is {state}"
    return found


def _run(argv: Sequence[str], env: Mapping[str, str], timeout_s: float | None) -> tuple[str, str]:
    """Run srun; returns what the nodes said, and why one that said nothing may not have."""
    with subprocess.Popen(
        argv,
        env={**env, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # --quit-on-interrupt: it ends the step
            try:
                out, err = process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            return out, f"no answer within {timeout_s:g} s"
        except BaseException:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            raise
    said = [line for line in err.splitlines() if line.strip()]
    return out, said[-1].strip() if said else f"srun ended with code {process.returncode}"


def unseen_lines(asked: Asked) -> list[str]:
    """Say what could not be seen, nodes with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for node, why in asked.unseen.items():
        reasons.setdefault(why, []).append(node)
    lines = [f"not seen: {NodeSet.fromlist(nodes)} ({why})" for why, nodes in reasons.items()]
    if asked.why and not asked.unseen:
        lines.append(f"no node was asked: {asked.why}")
    lines += [f"{node}: {fault}" for node, view in asked.views.items() for fault in view.faults]
    return lines


def mover(
    run_dir: str | None, job_dir: str | None, env: Mapping[str, str], command: Sequence[str], job_id: int | None = None
) -> list[str]:
    """Command line of a mover, started by a person: over the nodes of the run's job, or on this node alone.

    Args:
        run_dir: Run's directory; None: as the environment says.
        job_dir: Job's directory in the burst buffer; None: the job's own.
        env: Environment.
        command: ``drain`` and such, with its options.
        job_id: See :func:`find`.

    Raises:
        UsageError: There is no job, and no directory of this node is named.
        ConfigError: srun is not there, or the job cannot be asked.
    """
    program = [sys.executable, "-m", "slurm_resil", "mover", *command]
    place = from_env(env)
    in_job = "SLURM_JOB_ID" in env
    run_dir = run_dir or place.run_dir
    found = find(run_dir, job_dir or (place.job_dir if in_job and not job_id else None), env, job_id)
    if isinstance(found, Asked):
        alone = job_dir or (place.job_dir if in_job or env.get("SLURM_RESIL_RUN_ID") else None)
        if alone is None:
            newest = records.newest(run_dir)
            alone = newest.job_dir if newest is not None and newest.local else None
        if alone is None:
            why = found.why or f"nothing in {run_dir} says which job that was"
            raise UsageError(
                f"no job of this run is on nodes now: {why}", mend="name this node's directory with --job-dir"
            )
        made = command[0] == "fetch"  # it makes the directory, not what that is in
        where, what = (os.path.dirname(alone), "the burst buffer") if made else (alone, "the job's directory")
        directory_there(where, what, "name another one with --job-dir")
        return [*program, "--run-dir", run_dir, "--job-dir", alone]
    program += ["--run-dir", run_dir, "--job-dir", found.job_dir]
    places = load_layout(run_dir)
    nodes = list(places.nodes) if places is not None else list(found.nodes)
    lacking = sorted(set(nodes) - set(found.nodes))
    if lacking:
        raise ConfigError(
            f"job {found.job_id} does not have {', '.join(lacking[:8])}, where ranks of the run have their places",
            mend="wait until the launcher has given these places to other nodes",
        )
    if nodes == [this_node()]:
        return program
    srun = shutil.which("srun")
    if srun is None:
        raise ConfigError("srun is not found", mend="put Slurm's commands on PATH")
    argv = [*step(srun, nodes, f"resil-{command[0]}"), f"--jobid={found.job_id}"]
    return [*argv, "--kill-on-bad-exit=0", "--mpi=pmi2", "--gres=none", *program]


def become(
    command: Sequence[str],
    iteration: int | None,
    run_dir: str | None,
    job_dir: str | None,
    job_id: int | None,
    cap: float | None,
    *,
    as_json: bool,
) -> NoReturn:
    """Become the mover that a person asks for, for an iteration (None: the newest); see :func:`mover`.

    Raises:
        UsageError: See :func:`mover`.
        ConfigError: See :func:`mover`.
    """
    more = ["--iteration", "newest" if iteration is None else str(iteration)]
    more += [*(["--cap", str(cap)] if cap else []), *(["--json"] if as_json else [])]
    argv = mover(run_dir, job_dir, os.environ, [*command, *more], job_id)
    sys.stdout.flush()
    os.execve(argv[0], argv, clean(os.environ, keep_gpus=False))  # noqa: S606 - argv is a list of ours
