"""``slurm-resil run``: launch and supervise the ranks of a job."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace

import click

from slurm_resil.catalog import LocalCatalog, RunCatalog
from slurm_resil.cli.keep import options as keep_options
from slurm_resil.core import config, fsio, log, paths, units
from slurm_resil.core import layout as places
from slurm_resil.core.errors import ResilError, UsageError
from slurm_resil.core.protection import Protection
from slurm_resil.core.settings import MOST
from slurm_resil.launch import protect, records, setup
from slurm_resil.launch.cluster import Cluster
from slurm_resil.launch.commands import drain_args
from slurm_resil.launch.deadline import DeadlineWatch
from slurm_resil.launch.policy import Policy
from slurm_resil.launch.retain import Pruner
from slurm_resil.launch.starters import LocalStarter, SrunStarter, Starter
from slurm_resil.launch.supervise import Supervisor, newest_durable, say
from slurm_resil.recovery.client import EngineClient

DONE_S = 300.0  # a start of the same job so soon after a good end is not a person's wish


def _period(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    try:
        if text is not None:
            units.period_s(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}; {error.mend}") from error
    return text


def _scheme(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    try:
        if text is not None:
            Protection.parse(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}; {error.mend}") from error
    return text


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--every", type=click.IntRange(min=1, max=MOST, max_open=True), help="Checkpoint every N iterations.")
@click.option(
    "--interval", metavar="DURATION", callback=_period, help="Checkpoint every so long, as in 10min; also with --every."
)
@click.option("--ranks-per-node", type=click.IntRange(min=1), help="Default: SLURM_NTASKS_PER_NODE, or 1.")
@click.option("--nodes", type=click.IntRange(min=1), help="Run ranks on so many nodes of the allocation. Default: all.")
@click.option("--run-id", help="Name of the run over all its requeues. Default: the job id.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help="Without progress.")
@click.option(
    "--max-idle-attempts",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Attempts in a row that gain no iteration, before the job is held.",
)
@click.option("--srun-arg", "srun_args", multiple=True, help="More srun arguments for the ranks; repeatable.")
@click.option(
    "--cap", type=click.FloatRange(min=1), help="Limit of drains while training, bytes/s, all nodes together."
)
@click.option(
    "--redundancy", metavar="SCHEME", callback=_scheme, help="single, xor, rs:2, partner, or a list as in xor,rs:2/10."
)
@keep_options
@click.option("--local", is_flag=True, help="Without Slurm, on this host alone: for development.")
@click.option("--dry-run", is_flag=True, help="Print the layout and the command lines, start nothing.")
@click.argument("command", nargs=-1, required=True)
def run(
    every: int | None,
    interval: str | None,
    ranks_per_node: int | None,
    nodes: int | None,
    run_id: str | None,
    max_restarts: int,
    max_idle_attempts: int,
    srun_args: tuple[str, ...],
    cap: float | None,
    redundancy: str | None,
    local: bool,
    dry_run: bool,
    command: tuple[str, ...],
    keep: dict[str, str],
) -> None:
    """Run COMMAND once per rank, and keep it alive: `slurm-resil run --every 500 -- python train.py`.

    Ends with the ranks' exit code (128 + signal), with 0 when the training is complete, and with 75 when it was saved
    and asked to stop, and goes on later.
    """
    wishes = setup.Wishes(
        local=local,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        every=every,
        interval=interval,
        run_id=run_id,
        srun_args=srun_args,
        max_restarts=max_restarts,
        max_idle_attempts=max_idle_attempts,
        keep=keep,
        redundancy=redundancy,
    )
    env = dict(os.environ)
    allocation = (setup.local_allocation if local else setup.slurm_allocation)(env, wishes)
    cluster = setup.find_cluster(allocation, env, wishes)
    run_dir = setup.run_dir_of(env, allocation.run_id)
    if not dry_run:
        setup.make_run_dir(run_dir)
        if local:
            setup.alone(run_dir)
        job_id, restarts = allocation.job_id, allocation.restarts
        if records.complete(run_dir, job_id, restarts=restarts, within_s=DONE_S):
            say("the training was complete a moment ago, and Slurm started the job again: nothing is left to do")
            return
    layout = setup.place_ranks(allocation, wishes, run_dir)
    if dry_run:
        job = setup.make_job(
            allocation, layout, wishes=wishes, env=env, run_dir=run_dir, addresses={}, leader="HOST:PORT"
        )
        starter: Starter = LocalStarter(job) if local else SrunStarter(job, cluster)
        click.echo("\n".join(setup.dry_run_lines(starter.lines(command), layout)))
        return
    try:
        code = _supervise(wishes, env, allocation, cluster, run_dir, layout, command, cap)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        mend = "free space there; what was saved before is as it was"
        raise ResilError(f"cannot write into the run's directory {run_dir}: {error.strerror}", mend=mend) from error
    if local and code == 0:
        _tidy(paths.job_dir(setup.bb_root(env), allocation.job_id), run_dir)
    sys.exit(code)


def _tidy(job_dir: str, run_dir: str) -> None:
    """Give the burst buffer back after a complete run whose newest checkpoint is durable; in Slurm the epilog does."""
    sealed, durable = LocalCatalog(job_dir).sealed(), RunCatalog(run_dir).durable()
    if durable and max(sealed, default=0) <= max(durable):
        with contextlib.suppress(OSError), fsio.open_dir(os.path.dirname(job_dir)) as above:
            fsio.rmtree_at(above, os.path.basename(job_dir))


def _supervise(
    wishes: setup.Wishes,
    env: dict[str, str],
    allocation: setup.Allocation,
    cluster: Cluster,
    run_dir: str,
    layout: places.Layout,
    command: tuple[str, ...],
    cap: float | None,
) -> int:
    from slurm_resil.agent.leader import Leader

    attempt = allocation.attempt
    with contextlib.ExitStack() as stack:
        launcher_log = stack.enter_context(open(os.path.join(run_dir, "launcher.log"), "a", encoding="utf-8"))
        agent_log = stack.enter_context(open(os.path.join(run_dir, f"agents-{attempt}.log"), "ab"))
        log.configure(launcher_log)
        events = records.EventLog(run_dir, attempt)
        rules, warning = setup.rules(cluster, wishes)
        past = records.history(run_dir, attempt)
        expected, durable = records.goes_on_from(run_dir, allocation.job_id), newest_durable(run_dir)
        probe = setup.make_job(allocation, layout, wishes=wishes, env=env, run_dir=run_dir, addresses={}, leader="")
        record = records.Attempt(
            run_dir,
            attempt,
            job_id=allocation.job_id,
            restarts=allocation.restarts,
            nodes=layout.nodes,
            job_dir=probe.job_dir,
            slurm=not wishes.local,
        )
        record.update()
        places.save(run_dir, layout, attempt)
        leader = Leader(
            info=probe.info,
            nodes=layout.nodes,
            ranks_per_node=layout.ranks_per_node,
            run_dir=run_dir,
            host="127.0.0.1" if wishes.local else setup.own_address(cluster, allocation),
            interval_s=setup.interval_s(env, wishes),
            rebuilds=len(layout.nodes) > 1,
        )
        job = setup.make_job(
            allocation,
            layout,
            wishes=wishes,
            env=env,
            run_dir=run_dir,
            addresses=cluster.addresses(layout.nodes),
            leader=leader.address,
        )
        starter: Starter = LocalStarter(job, agent_log) if wishes.local else SrunStarter(job, cluster, agent_log)
        held = setup.settings(env, wishes)
        retention = held.retention
        address = "" if wishes.local else held.engine.value
        engine = EngineClient(address) if address else None
        protected = protect.plan(held, env, layout, run_dir, local=wishes.local)
        for words in protected.warnings:
            say(words)
        fetches = setup.fetches(env, len(layout.nodes), durable, expected)
        rules = replace(setup.measured(rules, leader.costs), prunes=retention.deletes, fetches=fetches)
        late = setup.late_job(allocation, job, env, events, local=wishes.local)
        supervisor = Supervisor(
            job=job,
            command=command,
            policy=Policy(
                layout.nodes,
                rules,
                durable=durable,
                history=past,
                chosen=protected.chosen,
                sets=protected.sets,
            ),
            leader=leader,
            cluster=cluster,
            starter=starter,
            events=events,
            attempt=record,
            engine=engine,
            watch=None if wishes.local else DeadlineWatch(cluster, leader.costs, held.lead_s.value),
            cap_bytes_s=cap or held.cap_bytes_s.value,
            drain_args=drain_args(held, config.load(env).drain),
            pruner=Pruner(run_dir, retention) if retention.deletes else None,
            late=late,
        )
        supervisor.report(
            "attempt_start", job_id=allocation.job_id, nodes=list(layout.nodes), ranks_per_node=layout.ranks_per_node
        )
        if retention.deletes:
            supervisor.report("retention", words=str(retention), run_dir=run_dir)
        if warning:
            supervisor.report("warning", words=warning)
        if engine is not None:
            try:
                engine.register(allocation.job_id)
            except ResilError as error:
                supervisor.report("warning", words=f"the engine does not look after this job: {error.message}")
        if late is not None:
            late.submit()
        code = supervisor.run()
        if late is not None:
            levels = records.levels(run_dir)
            if not late.released or (levels is not None and levels.local <= newest_durable(run_dir)):
                late.not_needed()
        return code
