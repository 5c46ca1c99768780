"""Everything of an attempt put together, from what the environment says and what the user wants."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ClusterShell.NodeSet import NodeSet, NodeSetParseError

from slurm_resil.core import config, fsio, ids, paths
from slurm_resil.core import layout as layouts
from slurm_resil.core.costs import Costs
from slurm_resil.core.errors import ConfigError, DataError, ResilError, TryAgainError, UsageError
from slurm_resil.core.layout import Layout
from slurm_resil.core.log import event
from slurm_resil.core.model import RunInfo
from slurm_resil.core.settings import Settings
from slurm_resil.launch import layout as places
from slurm_resil.launch import records
from slurm_resil.launch.cluster import Cluster, LocalCluster, SlurmCluster
from slurm_resil.launch.commands import Job, check_srun_args, layout_variable
from slurm_resil.launch.latejob import LateJob
from slurm_resil.launch.policy import Rules

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asked for on the command line; None: not said.

    Attributes:
        local: Without Slurm, on this host.
        nodes: Nodes that run ranks; default: all of the allocation.
        ranks_per_node: Ranks on each.
        every: Iterations between checkpoints.
        interval: Time between checkpoints, as people write it.
        run_id: Name of the run.
        srun_args: More srun arguments for the ranks.
        max_restarts: See Rules.
        max_idle_attempts: See Rules.
        keep: Variables of the retention, see core.settings.
        redundancy: How checkpoints are protected, see core.protection.
    """

    local: bool = False
    nodes: int | None = None
    ranks_per_node: int | None = None
    every: int | None = None
    interval: str | None = None
    run_id: str | None = None
    srun_args: tuple[str, ...] = ()
    max_restarts: int = 3
    max_idle_attempts: int = 3
    keep: Mapping[str, str] = field(default_factory=dict)
    redundancy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What the launcher runs in.

    Attributes:
        job_id: Slurm's job id, or a number made from the run's name.
        run_id: Name of the run.
        attempt: Number of this grant of nodes in the run.
        restarts: How often Slurm has started the job again. It begins at 0 for a successor of the job, and a slurmctld
            that is killed may count the same start twice: what is in the run's directory goes by ``attempt``.
        nodes: Nodes, in Slurm's order.
        ranks_per_node: As the job asked for.
        here: Name of this node, None if the launcher is on none of them.
    """

    job_id: int
    run_id: str
    attempt: int
    restarts: int = 0
    nodes: tuple[str, ...]
    ranks_per_node: int
    here: str | None


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if not value:
        return None
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r} is not a number, as in {name}=4", key=name)
    return int(value)


def slurm_allocation(env: Mapping[str, str], wishes: Wishes) -> Allocation:
    """Read what Slurm says.

    Raises:
        UsageError: This is no job.
        ConfigError: A variable makes no sense.
    """
    job_id, nodelist = _number(env, "SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
    if job_id is None or not nodelist:
        raise UsageError(
            "this is not inside a Slurm job", mend="call it in a batch script, or with --local for this host alone"
        )
    try:
        nodes = tuple(NodeSet(nodelist))
    except NodeSetParseError as error:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodelist!r}: {error}", key="SLURM_JOB_NODELIST") from error
    run_id = wishes.run_id or env.get("SLURM_RESIL_RUN_ID") or str(job_id)
    restarts = _number(env, "SLURM_RESTART_COUNT") or 0
    return Allocation(
        job_id=job_id,
        run_id=run_id,
        attempt=max(restarts, records.next_number(run_dir_of(env, run_id))),
        restarts=restarts,
        nodes=nodes,
        ranks_per_node=_number(env, "SLURM_NTASKS_PER_NODE") or 1,
        here=env.get("SLURMD_NODENAME"),
    )


def local_allocation(env: Mapping[str, str], wishes: Wishes) -> Allocation:
    """This host as the only node; the attempts of a named run are counted by their records."""
    run_id = wishes.run_id or env.get("SLURM_RESIL_RUN_ID") or ids.process_name(os.getpid())
    node = socket.gethostname()
    attempt = records.next_number(run_dir_of(env, run_id))
    job_id = paths.local_job(prefix_root(env), run_id)
    return Allocation(job_id=job_id, run_id=run_id, attempt=attempt, nodes=(node,), ranks_per_node=1, here=node)


def settings(env: Mapping[str, str], wishes: Wishes) -> Settings:
    """What holds for this job: the command line over the environment over the site over the defaults.

    Raises:
        ConfigError: The environment or the site's configuration makes no sense, or the site leaves something to nobody.
    """
    said = {
        "SLURM_RESIL_EVERY": wishes.every,
        "SLURM_RESIL_INTERVAL": wishes.interval,
        "SLURM_RESIL_REDUNDANCY": wishes.redundancy,
    }
    over = {name: str(value) for name, value in said.items() if value is not None} | dict(wishes.keep)
    return Settings.from_env({**env, **over}, config.load(env))


def interval_s(env: Mapping[str, str], wishes: Wishes) -> float | None:
    """Seconds between checkpoints, None if nobody said."""
    return settings(env, wishes).interval_s.value


def prefix_root(env: Mapping[str, str]) -> str:
    """Where the directories of runs are."""
    return settings(env, Wishes()).prefix_root.value


def bb_root(env: Mapping[str, str]) -> str:
    """Where the directories of jobs are on a node."""
    return settings(env, Wishes()).bb_root.value


def run_dir_of(env: Mapping[str, str], run_id: str) -> str:
    """Name of the run's directory.

    Raises:
        ConfigError: That is no name for a run.
    """
    if "/" in run_id or run_id in ("", ".", "..") or len(run_id.encode()) > paths.RUN_ID_BYTES:
        short = run_id if len(run_id) <= 60 else f"{run_id[:60]}..."
        raise ConfigError(f"{short!r} cannot name a run, as in --run-id llama-3", key="SLURM_RESIL_RUN_ID")
    return paths.run_dir(prefix_root(env), run_id)


def alone(run_dir: str) -> int:
    """Lock a run of this host for as long as this process lives; returns the descriptor.

    In Slurm a job id is given once, and a lock that a dead host's file system still holds must keep nobody waiting.

    Raises:
        TryAgainError: Another launcher has it.
    """
    fd = os.open(os.path.join(run_dir, "launcher.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        words = f"another launcher is at the run in {run_dir}"
        raise TryAgainError(words, mend="wait for its end, or give this run another --run-id") from error
    except OSError:
        pass  # no locks here
    return fd


def make_run_dir(path: str) -> None:
    """Make the run's directory.

    Raises:
        ConfigError: It cannot be made or written; names the path and the mend.
    """
    mend = "make it writable, or set SLURM_RESIL_PREFIX to a directory on the parallel file system that is"
    try:
        os.makedirs(path, exist_ok=True)
        fsio.write_atomic(os.path.join(path, ".probe"), b"", sync=False)
        os.unlink(os.path.join(path, ".probe"))
    except OSError as error:
        raise ConfigError(f"cannot use the run's directory {path}: {error.strerror}", mend=mend, path=path) from error


def own_address(cluster: Cluster, allocation: Allocation) -> str:
    """Address of this host that the nodes can reach.

    Raises:
        ConfigError: None is found.
    """
    if allocation.here is not None:
        known = cluster.addresses([allocation.here])
        if allocation.here in known:
            return socket.gethostbyname(known[allocation.here])
    peer = next(iter(cluster.addresses(allocation.nodes[:1]).values()), None)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer or allocation.nodes[0], 9))  # sends nothing: it asks for the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no address of this host is found that {peer} can reach: {error}") from error


def place_ranks(allocation: Allocation, wishes: Wishes, run_dir: str) -> Layout:
    """Give every node its place: the one it had in the attempt before, if it had one.

    Raises:
        UsageError: There are not so many nodes.
    """
    try:
        before = layouts.load(run_dir)
    except DataError as error:
        # ranks get new places, and are restored from wherever their shards are
        moved = f"{paths.layout(run_dir)}.bad"
        event(log, "layout_set_aside", level=logging.ERROR, why=str(error), moved=moved, instead="a new layout")
        with contextlib.suppress(OSError):
            os.replace(paths.layout(run_dir), moved)
        before = None
    count = wishes.nodes or len(allocation.nodes)
    nodes = places.assign(before.nodes if before else (), allocation.nodes, count)
    per_node = wishes.ranks_per_node or allocation.ranks_per_node
    return Layout(nodes=nodes, ranks_per_node=per_node)


def find_cluster(allocation: Allocation, env: Mapping[str, str], wishes: Wishes) -> Cluster:
    """Slurm, or this host."""
    return LocalCluster() if wishes.local else SlurmCluster(allocation.job_id, env)


def rules(cluster: Cluster, wishes: Wishes) -> tuple[Rules, str]:
    """Ask Slurm whether this job can come back at all.

    Returns:
        The rules, and a warning (empty: none). When nobody answers, a requeue is assumed to be possible.
    """
    restarts, idle = wishes.max_restarts, wishes.max_idle_attempts
    if wishes.local:
        no = "there is no Slurm"
        return Rules(max_restarts=restarts, max_idle_attempts=idle, can_continue=False, why_not=no), ""
    try:
        record = cluster.record()
        customs = cluster.customs(record.partition)
    except ResilError as error:
        warning = f"cannot tell whether this job can be requeued: {error.message}"
        return Rules(max_restarts=restarts, max_idle_attempts=idle), warning
    why = record.why_no_requeue()
    warning = why and f"this job cannot be requeued: {why}"
    if not why and customs.preempt_mode in ("CANCEL", "SUSPEND", "GANG,SUSPEND"):
        warning = (
            f"its partition has PreemptMode={customs.preempt_mode}: Slurm itself never requeues a preempted job there, "
            "only this launcher does, and only within the partition's GraceTime"
        )
    made = Rules(
        max_restarts=restarts,
        max_idle_attempts=idle,
        can_continue=not why,
        why_not=why,
        kill_wait_s=customs.kill_wait_s,
    )
    return made, warning


def fetches(env: Mapping[str, str], nodes: int, durable: int, expected: int) -> bool:
    """Whether the durable checkpoint is staged on the nodes while the ranks start.

    Args:
        env: Environment, which says where the site's configuration is.
        nodes: Number of nodes.
        durable: Newest durable iteration, 0 if there is none.
        expected: What the attempt before wanted this one to go on from, 0 if that is unknown.
    """
    site = config.load(env).drain.fetch
    return expected <= durable > 0 and (site == "on" or (site == "auto" and nodes > 1))


def measured(rules: Rules, costs: Costs) -> Rules:
    """Take what movers have taken in earlier attempts for what they will take, where that is known."""
    drain, encode = costs.p99("drain"), costs.p99("encode")
    return replace(
        rules,
        drain_guess_s=rules.drain_guess_s if drain is None else drain,
        encode_guess_s=rules.encode_guess_s if encode is None else encode,
    )


def late_job(
    allocation: Allocation, job: Job, env: Mapping[str, str], events: records.EventLog, *, local: bool
) -> LateJob | None:
    """The job that drains what this one leaves on its nodes, where the site has it so; not submitted yet."""
    drain = config.load(env).drain
    if local or drain.late != "job":
        return None
    return LateJob(
        allocation.job_id,
        job.layout.nodes,
        job.job_dir,
        job.run_dir,
        limit_s=drain.late_limit_s,
        env=env,
        tell=events.write,
    )


def clean_env(env: Mapping[str, str], wishes: Wishes) -> dict[str, str]:
    """Environment that everything is started from: without Slurm's variables where there is no Slurm."""
    drop = ("SLURM_", "SLURMD_") if wishes.local else ()
    keep = {name: value for name, value in env.items() if not name.startswith(drop or ("\0",))}
    keep |= {name: value for name, value in env.items() if name.startswith("SLURM_RESIL_")}
    return keep


def make_job(
    allocation: Allocation,
    layout: Layout,
    *,
    wishes: Wishes,
    env: Mapping[str, str],
    run_dir: str,
    addresses: Mapping[str, str],
    leader: str,
) -> Job:
    """Put together what the command lines are made from; writes the layout's file if one is needed.

    Raises:
        UsageError: An srun argument that would move ranks.
    """
    check_srun_args(wishes.srun_args)
    held = settings(env, wishes)
    value, text = layout_variable(layout, run_dir)
    if text:
        fsio.write_atomic(value[1:], text.encode())
    return Job(
        info=RunInfo(
            run_id=allocation.run_id,
            job_id=allocation.job_id,
            attempt=allocation.attempt,
            cycle=0,
            world_size=layout.world_size,
            nodes=len(layout.nodes),
        ),
        layout=layout,
        addresses=addresses,
        run_dir=run_dir,
        job_dir=paths.job_dir(bb_root(env), allocation.job_id),
        restarts=allocation.restarts,
        every=held.every.value,
        slots=held.slot_count,
        leader=leader,
        python=sys.executable,
        base_env=clean_env(env, wishes),
        srun_args=wishes.srun_args,
    )


def dry_run_lines(lines: Sequence[object], layout: Layout) -> list[str]:
    """What a dry run prints."""
    table = [f"node_rank {place}: {node}" for place, node in enumerate(layout.nodes)]
    return [*table, *(str(line) for line in lines)]
