"""``slurm-resil ckpt prune`` and ``ckpt keep``: which checkpoints of a run stay."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict

import click

from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.keep import only
from slurm_resil.cli.keep import options as keep_options
from slurm_resil.cli.look import tidy
from slurm_resil.cli.nodes import Asked, run_dir_of, survey, unseen_lines
from slurm_resil.cli.places import as_json_option, examples, here_option, job_option, places, resolve
from slurm_resil.cli.table import size
from slurm_resil.core import config, fsio, paths
from slurm_resil.core.errors import NotPermittedError, ResilError, TryAgainError, UsageError
from slurm_resil.core.retention import Retention
from slurm_resil.core.settings import Settings
from slurm_resil.launch.retain import Plan, Pruned, Pruner


def retention(env: Mapping[str, str]) -> Retention:
    """What the environment and the site say.

    Raises:
        ConfigError: They make no sense.
    """
    return Settings.from_env(env, config.load(env)).retention


@click.command(
    epilog=examples(
        "slurm-resil ckpt prune --keep-last 3 --yes", "slurm-resil ckpt prune --redundancy --job 4711 --yes"
    )
)
@places
@job_option
@here_option
@keep_options
@click.option("--redundancy", "only_redundancy", is_flag=True, help="Only what the nodes hold for each other.")
@click.option("--yes", is_flag=True, help="Delete. Without it nothing is deleted, only said.")
@as_json_option
def prune(
    run_dir: str | None,
    job_dir: str | None,
    job_id: int | None,
    here: bool,
    keep: dict[str, str],
    only_redundancy: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Say which drained checkpoints would be deleted; with --yes, delete them.

    The rules are those of the options or, if none is given, of the environment and the site, which `slurm-resil run`
    goes by. The newest whole checkpoint always stays. In the burst buffers of the job's nodes the parities and copies
    go that protect nothing any more: of an encode that never came to its end, and of checkpoints that are older than
    the newest durable one. Ends with 75 if something that should go is in use.
    """
    run_dir, job_dir = resolve(run_dir_of(job_id, run_dir), job_dir)
    rules = Retention() if only_redundancy else retention(only(keep, os.environ))
    if keep and only_redundancy:
        raise UsageError("--redundancy has nothing to do with drained checkpoints", mend="leave out --keep-...")
    if not rules.deletes and not only_redundancy:
        raise UsageError(
            "no rule says what is kept, so everything is",
            mend="say --keep-last N, --keep-every N, --keep-interval DURATION, --keep-best METRIC:min, or --redundancy",
        )
    pruner = Pruner(run_dir, rules)
    plan = Plan(why={}) if only_redundancy else pruner.plan()
    cleared = [*plan.unfinished, *plan.evidence]
    done = (Pruned() if only_redundancy else pruner.prune()) if yes else None
    asked = _tidy(run_dir, job_dir, job_id, here=here, yes=yes)
    row = {
        "run_dir": run_dir,
        "rules": str(rules),
        "deleted": done is not None,
        "kept": {str(iteration): list(why) for iteration, why in plan.why.items() if why},
        "go": list(plan.go) if done is None else done.deleted,
        "cleared": cleared if done is None else done.cleared,
        "bytes": done.nbytes if done is not None else None,
        "left": {} if done is None else {str(i): why for i, why in (done.left | done.failed).items()},
        "redundancy": {
            node: {"files": [asdict(one) for one in view.waste], "left": view.left or {}, "faults": view.faults}
            for node, view in asked.views.items()
        },
        "unseen": asked.unseen,
    }
    if as_json:
        click.echo(json.dumps(row))
    else:
        _say(plan, done, cleared, asked)
    _judge(done, asked, told=as_json)


def _tidy(run_dir: str, job_dir: str | None, job_id: int | None, *, here: bool, yes: bool) -> Asked:
    arguments = ["--tidy", "do" if yes else "say"]
    asked = survey(run_dir, job_dir, os.environ, job_id=job_id, here=here, arguments=arguments)
    for view in asked.views.values() if not asked.told else ():
        tidy(view, run_dir, yes=yes)
    return asked


def _say(plan: Plan, done: Pruned | None, cleared: list[int], asked: Asked) -> None:
    left = {} if done is None else done.left | done.failed
    for iteration, why in plan.why.items():
        gone = "deleted" if done is not None and iteration in done.deleted else "would be deleted"
        stays = done is not None and iteration not in done.deleted
        click.echo(f"{iteration:>12}  {', '.join(why) or (f'stays: {left.get(iteration)}' if stays else gone)}")
    for iteration in cleared if done is None else done.cleared:
        what = "would be cleared away" if done is None else "cleared away"
        click.echo(f"{iteration:>12}  {what}: it is bad, or its drain or deletion never came to its end")
    for node, view in asked.views.items():
        for one in view.waste:
            what = "would be removed" if done is None else "removed"
            click.echo(f"{one.iteration:>12}  {what} on {node}: {one.name} ({size(one.nbytes)}), for {one.why}")
    for line in unseen_lines(asked):
        click.echo(line)
    if done is None and (plan.go or cleared or any(view.waste for view in asked.views.values())):
        click.echo("nothing was deleted; say --yes to do it")


def _judge(done: Pruned | None, asked: Asked, *, told: bool) -> None:
    """End with an error if not all was deleted that should have been."""
    busy, failed = [], []
    if done is not None:
        busy += [f"iteration {iteration}: {why}" for iteration, why in done.left.items()]
        failed += [f"iteration {iteration}: {why}" for iteration, why in done.failed.items()]
    for node, view in asked.views.items():
        busy += [f"{name} on {node}: {why}" for name, why in (view.left or {}).items()]
        failed += [f"{node}: {fault}" for fault in view.faults]
    if busy or failed:
        words = "; ".join([*busy, *failed])
        problem = (ResilError if failed else TryAgainError)(f"not all was deleted: {words}", mend="try again")
        problem.told = told
        raise problem


@click.command(epilog=examples("slurm-resil ckpt keep 500", "slurm-resil ckpt keep 500 --release"))
@click.argument("iteration", type=click.IntRange(min=0))
@places
@click.option("--release", is_flag=True, help="Leave it to the rules again.")
def keep(iteration: int, run_dir: str | None, job_dir: str | None, release: bool) -> None:
    """Keep a drained checkpoint whatever the rules say, as when another run starts from it."""
    run_dir, _ = resolve(run_dir, job_dir)
    mark = paths.drained_kept(run_dir, iteration)
    try:
        if release:
            os.unlink(mark)
            return
        fsio.write_atomic(mark, b"")  # first: what is there after it stays
        try:
            RunCatalog(run_dir).load(iteration)
        except BaseException:
            os.unlink(mark)
            raise
    except FileNotFoundError as error:
        what = "is not kept by hand" if release else "is not there"
        raise UsageError(
            f"iteration {iteration} of {run_dir} {what}", mend="look with `slurm-resil ckpt ls`"
        ) from error
    except OSError as error:
        raise NotPermittedError(f"cannot change {mark}: {error.strerror}", mend="be the run's owner") from error
