"""``slurm-resil ckpt prune`` and ``ckpt keep``: which checkpoints of a run stay."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import click

from slurm_resil.catalog import RunCatalog
from slurm_resil.cli.keep import only
from slurm_resil.cli.keep import options as keep_options
from slurm_resil.cli.places import as_json_option, places, resolve
from slurm_resil.core import config, fsio, paths
from slurm_resil.core.errors import NotPermittedError, ResilError, TryAgainError, UsageError
from slurm_resil.core.retention import Retention
from slurm_resil.core.settings import Settings
from slurm_resil.launch.retain import Pruner


def retention(env: Mapping[str, str]) -> Retention:
    """What the environment and the site say.

    Raises:
        ConfigError: They make no sense.
    """
    return Settings.from_env(env, config.load(env)).retention


@click.command()
@places
@keep_options
@click.option("--yes", is_flag=True, help="Delete. Without it nothing is deleted, only said.")
@as_json_option
def prune(run_dir: str | None, job_dir: str | None, keep: dict[str, str], yes: bool, as_json: bool) -> None:
    """Say which drained checkpoints would be deleted; with --yes, delete them.

    The rules are those of the options or, if none is given, of the environment and the site, which `slurm-resil run`
    goes by. The newest whole checkpoint always stays. Ends with 75 if something that should go is in use.
    """
    run_dir, _ = resolve(run_dir, job_dir)
    rules = retention(only(keep, os.environ))
    if not rules.deletes:
        raise UsageError(
            "no rule says what is kept, so everything is",
            mend="say --keep-last N, --keep-every N, --keep-interval DURATION or --keep-best METRIC:min",
        )
    pruner = Pruner(run_dir, rules)
    plan = pruner.plan()
    cleared = [*plan.unfinished, *plan.evidence]
    done = pruner.prune() if yes else None
    row = {
        "run_dir": run_dir,
        "rules": str(rules),
        "deleted": done is not None,
        "kept": {str(iteration): list(why) for iteration, why in plan.why.items() if why},
        "go": list(plan.go) if done is None else done.deleted,
        "cleared": cleared if done is None else done.cleared,
        "bytes": done.nbytes if done is not None else None,
        "left": {} if done is None else {str(i): why for i, why in (done.left | done.failed).items()},
    }
    if as_json:
        click.echo(json.dumps(row))
    else:
        for iteration, why in plan.why.items():
            gone = "deleted" if done is not None and iteration in done.deleted else "would be deleted"
            stays = done is not None and iteration not in done.deleted
            left = f"stays: {row['left'].get(str(iteration), '')}" if stays and isinstance(row["left"], dict) else gone
            click.echo(f"{iteration:>12}  {', '.join(why) or left}")
        for iteration in cleared if done is None else done.cleared:
            what = "would be cleared away" if done is None else "cleared away"
            click.echo(f"{iteration:>12}  {what}: it is bad, or its drain or deletion never came to its end")
        if done is None and (plan.go or cleared):
            click.echo("nothing was deleted; say --yes to do it")
    if done is not None and (done.left or done.failed):
        words = "; ".join(f"iteration {iteration}: {why}" for iteration, why in (done.left | done.failed).items())
        problem = (ResilError if done.failed else TryAgainError)(f"not all was deleted: {words}", mend="try again")
        problem.told = as_json
        raise problem


@click.command()
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
