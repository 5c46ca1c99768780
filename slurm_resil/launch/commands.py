"""Command lines and environments of everything the launcher starts. Pure.

The environment of a batch script carries the *job's* shape (``SLURM_NTASKS``, ``SLURM_NNODES``...), which srun takes
for the step's: a step on fewer nodes than the job then fails or gets another shape. So every one of those variables
is taken out and the step's shape is said on the command line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ClusterShell.NodeSet import NodeSet

from slurm_resil.core.config import Drain
from slurm_resil.core.errors import UsageError
from slurm_resil.core.layout import Layout
from slurm_resil.core.model import RunInfo
from slurm_resil.core.settings import SLOTS, Settings
from slurm_resil.launch.layout import rendezvous_port
from slurm_resil.launch.moves import MoverKind
from slurm_resil.launch.rank import LAYOUT

# the shape of the job or of another step, and preferences that would change what the command line says
# fmt: off
TRAPS = frozenset((
    "SLURM_CLUSTERS_LIST", "SLURM_CORE_SPEC", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE", "SLURM_EXACT",
    "SLURM_EXCLUSIVE", "SLURM_EXPORT_ENV", "SLURM_GTIDS", "SLURM_HINT", "SLURM_HOSTFILE", "SLURM_IMMEDIATE",
    "SLURM_JOB_NUM_NODES", "SLURM_KILL_BAD_EXIT", "SLURM_LABELIO", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID",
    "SLURM_MEM_BIND", "SLURM_MEM_BIND_LIST", "SLURM_MEM_BIND_PREFER", "SLURM_MEM_BIND_SORT", "SLURM_MEM_BIND_TYPE",
    "SLURM_MEM_BIND_VERBOSE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_MPI_TYPE",
    "SLURM_NNODES", "SLURM_NODEID", "SLURM_NODELIST", "SLURM_NO_KILL", "SLURM_NPROCS", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES", "SLURM_OVERCOMMIT", "SLURM_OVERLAP", "SLURM_PROCID", "SLURM_QUIT_ON_INTERRUPT",
    "SLURM_RELATIVE", "SLURM_RESV_PORTS", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_STDERRMODE",
    "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_THREADS",
    "SLURM_THREADS_PER_CORE", "SLURM_TIMELIMIT", "SLURM_TRES_PER_TASK", "SLURM_UNBUFFEREDIO", "SLURM_UNBUFFERED_IO",
    "SLURM_WAIT", "SRUN_CPUS_PER_TASK",
))
# fmt: on
TRAP_PREFIXES = ("SLURM_STEP", "PMI_", "PMIX_", "SLURM_PMI", "SLURM_HET_SIZE")
GPU_TRAPS = frozenset(("SLURM_GRES", "SLURM_STEP_GRES", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"))
LAYOUT_LIMIT_BYTES = 100_000  # Linux takes 128 KiB per variable

# options of ours that a user may not change through --srun-arg: the places of ranks hang on them
# fmt: off
FIXED_OPTIONS = frozenset((
    "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--nodelist", "-w", "--exclude", "-x", "--export",
    "--distribution", "-m", "--relative", "-r", "--job-name", "-J", "--label", "-l", "--kill-on-bad-exit", "-K",
))
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start.

    Attributes:
        argv: Program and arguments.
        env: Its whole environment.
        title: What it is, for logs.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    title: str

    def __str__(self) -> str:
        return shlex.join(self.argv)

    @property
    def step(self) -> str:
        """Name of its step in Slurm, empty if it makes none."""
        return next((part.partition("=")[2] for part in self.argv if part.startswith("--job-name=")), "")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the command lines are made from; the same for a whole attempt.

    Attributes:
        info: Run, job, attempt; ``cycle`` is given apart.
        layout: Places.
        addresses: Address of each node by name, where ranks and agents meet.
        run_dir: Run's directory on the parallel file system.
        job_dir: Job's directory in the burst buffer, the same path on every node.
        restarts: How often Slurm has started the job again.
        every: Iterations between checkpoints, None if nobody said.
        slots: Slots of each rank.
        leader: ``host:port`` of the leader.
        python: Interpreter with this package.
        base_env: Environment of the launcher.
        srun: Program name or path.
        srun_args: More srun arguments for the ranks, from the user.
    """

    info: RunInfo
    layout: Layout
    addresses: Mapping[str, str]
    run_dir: str
    job_dir: str
    restarts: int
    every: int | None
    leader: str
    python: str
    base_env: Mapping[str, str] = field(repr=False)
    slots: int = SLOTS
    srun: str = "srun"
    srun_args: tuple[str, ...] = ()


def clean(env: Mapping[str, str], *, keep_gpus: bool = True) -> dict[str, str]:
    """Environment without the traps."""
    drop = TRAPS if keep_gpus else TRAPS | GPU_TRAPS
    return {name: value for name, value in env.items() if name not in drop and not name.startswith(TRAP_PREFIXES)}


def check_srun_args(arguments: Sequence[str]) -> None:
    """Refuse arguments that would move ranks.

    Raises:
        UsageError: Names the argument.
    """
    for argument in arguments:
        name = argument.split("=")[0]
        short = argument[:2] if argument.startswith("-") and not argument.startswith("--") else name
        if name in FIXED_OPTIONS or short in FIXED_OPTIONS:
            raise UsageError(
                f"--srun-arg {argument}: the launcher sets {short if short in FIXED_OPTIONS else name} itself",
                mend="use --nodes and --ranks-per-node",
            )


def layout_variable(layout: Layout, run_dir: str) -> tuple[str, str]:
    """Value of the layout variable, and the text of the file that it names (empty: no file is needed)."""
    text = ",".join(layout.nodes)
    if len(text) <= LAYOUT_LIMIT_BYTES:
        return text, ""
    return f"@{run_dir}/layout.names", text


def resil_env(job: Job, cycle: int, env: dict[str, str]) -> dict[str, str]:
    """Add what agents and ranks are told, in place."""
    layout = job.layout
    master = layout.nodes[0]
    if job.every is not None:
        env["SLURM_RESIL_EVERY"] = str(job.every)
    env.update(
        {
            "SLURM_RESIL": "1",
            "SLURM_RESIL_RUN_ID": job.info.run_id,
            "SLURM_RESIL_PREFIX": os.path.dirname(job.run_dir),
            "SLURM_RESIL_BB_ROOT": os.path.dirname(job.job_dir),
            "SLURM_RESIL_LEADER": job.leader,
            "SLURM_RESIL_ATTEMPT": str(job.info.attempt),
            "SLURM_RESIL_CYCLE": str(cycle),
            "SLURM_RESIL_NODES": str(len(layout.nodes)),
            "SLURM_RESIL_RANKS_PER_NODE": str(layout.ranks_per_node),
            "SLURM_RESIL_WORLD_SIZE": str(layout.world_size),
            "SLURM_RESIL_SLOT_COUNT": str(job.slots),
            LAYOUT: layout_variable(layout, job.run_dir)[0],
            "MASTER_ADDR": job.addresses.get(master, master),
            "MASTER_PORT": str(rendezvous_port(job.info.job_id, job.info.attempt, cycle)),
        }
    )
    return env


def _shape(job: Job, nodes: Sequence[str], per_node: int, name: str) -> list[str]:
    return step(job.srun, nodes, name, per_node)


def step(srun: str, nodes: Sequence[str], name: str, per_node: int = 1) -> list[str]:
    """A step beside all others, with so many tasks on each of these nodes, in this order.

    Args:
        srun: Program name or path.
        nodes: Nodes.
        name: Of the step.
        per_node: Tasks on each node.
    """
    tasks = [node for node in nodes for _ in range(per_node)]
    arbitrary = ",".join(tasks)
    if len(arbitrary) <= LAYOUT_LIMIT_BYTES:
        # Slurm's task numbers, and so its labels and its messages, are then our ranks; from 24.11 on the number of
        # nodes must not be said beside it
        places = ["--distribution=arbitrary", f"--nodelist={arbitrary}"]
    else:
        nodelist = f"--nodelist={NodeSet.fromlist(nodes)}"
        places = [f"--nodes={len(nodes)}", f"--ntasks-per-node={per_node}", nodelist]
    return [
        srun,
        "--overlap",
        "--overcommit",
        f"--ntasks={len(tasks)}",
        *places,
        f"--job-name={name}",
        "--cpu-bind=none",
        "--export=ALL",
        "--input=none",
        "--quit-on-interrupt",
        "--wait=0",
    ]


def step_name(job: Job, what: str) -> str:
    """Name of a step; steps are killed by it.

    It names the attempt: a launcher may outlive its attempt, and must not kill the steps of the next one.
    """
    return f"resil-{what}@{job.info.attempt}"


def ranks(job: Job, cycle: int, command: Sequence[str]) -> Command:
    """One srun for all ranks of a cycle.

    Not with ``--kill-on-bad-exit=1``: SIGTERM would be sent, which ranks ignore, and SIGKILL only after KillWait, and a
    slurmstepd that waits for that takes no other SIGKILL. The launcher kills the step itself, at once.
    """
    argv = _shape(job, job.layout.nodes, job.layout.ranks_per_node, step_name(job, f"ranks-{cycle}"))
    argv += ["--kill-on-bad-exit=0", "--label", "--unbuffered", "--mpi=none", *job.srun_args]
    argv += [job.python, "-m", "slurm_resil.launch.rank", "--", *command]
    env = resil_env(job, cycle, clean(job.base_env))
    return Command(argv=tuple(argv), env=env, title=f"ranks of cycle {cycle}")


def agent_args(job: Job) -> list[str]:
    """The agent itself, without a launcher."""
    return [job.python, "-m", "slurm_resil", "agent", "serve"]


def agents(job: Job, cycle: int, nodes: Sequence[str]) -> Command:
    """One srun for the agents of some nodes; a dead agent or node does not take the others along."""
    argv = _shape(job, nodes, 1, step_name(job, "agent"))
    argv += ["--kill-on-bad-exit=0", "--no-kill", "--label", "--unbuffered", "--mpi=none", "--gres=none"]
    argv += agent_args(job)
    env = resil_env(job, cycle, clean(job.base_env, keep_gpus=False))
    return Command(argv=tuple(argv), env=env, title=f"agents of {','.join(nodes)}")


def mark(job: Job, nodes: Sequence[str], path: str, text: str) -> Command:
    """Write (or with an empty text remove) a small file on nodes."""
    argv = _shape(job, nodes, 1, step_name(job, "mark"))
    argv += ["--kill-on-bad-exit=0", "--no-kill", "--mpi=none", "--gres=none"]
    argv += [job.python, "-m", "slurm_resil.launch.mark", path, text]
    return Command(argv=tuple(argv), env=clean(job.base_env, keep_gpus=False), title=f"mark of {','.join(nodes)}")


@dataclass(frozen=True, kw_only=True)
class Move:
    """What a mover does.

    Attributes:
        kind: A command of ``slurm-resil mover``.
        iteration: Of which checkpoint.
        cap_bytes_s: Bandwidth of all movers together, None without a limit.
        finish: Whether it goes on through the SIGTERM of a grace period.
        arguments: More of the command.
    """

    kind: MoverKind
    iteration: int
    cap_bytes_s: float | None = None
    finish: bool = False
    arguments: tuple[str, ...] = ()


def site_args(drain: Drain) -> list[str]:
    """Arguments of a drain that follow from a site's ``[drain]`` alone."""
    said = [f"--hint={name}={value}" for name, value in sorted(drain.hints.items())]
    said += [f"--buffer={drain.buffer_bytes}"] if drain.buffer_bytes is not None else []
    return said + ([] if drain.gather else ["--no-gather"])


def drain_args(held: Settings, drain: Drain | None = None) -> list[str]:
    """Arguments of a drain that follow from the job's settings, and from what only the site says."""
    return ["--retry", f"{held.retry_s.value:g}", *site_args(replace(drain or Drain(), hints=held.hints.value))]


def mover_args(job: Job, move: Move) -> list[str]:
    """Arguments of a mover itself, without a launcher."""
    argv = [job.python, "-m", "slurm_resil", "mover", move.kind]
    argv += ["--run-dir", job.run_dir, "--job-dir", job.job_dir, "--iteration", str(move.iteration), "--json"]
    argv += ["--on-term", "finish" if move.finish else "stop", *move.arguments]
    return argv + (["--cap", f"{move.cap_bytes_s:.0f}"] if move.cap_bytes_s else [])


def mover(job: Job, move: Move) -> Command:
    """One short MPI step, one process per node; one that dies takes the others along as with :func:`ranks`."""
    argv = _shape(job, job.layout.nodes, 1, step_name(job, f"{move.kind}-{move.iteration}"))
    argv += ["--kill-on-bad-exit=0", "--mpi=pmi2", "--gres=none", *mover_args(job, move)]
    env = resil_env(job, 0, clean(job.base_env, keep_gpus=False))
    return Command(argv=tuple(argv), env=env, title=f"{move.kind} of iteration {move.iteration}")
