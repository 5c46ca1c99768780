"""``slurm-resil hook``: prolog and epilog by hand, to see what they would do. Sites call them by the lighter way."""

from __future__ import annotations

import sys

import click

from slurm_resil.hooks import base, epilog, prolog


@click.group()
def hook() -> None:
    """Run a hook as slurmd would, with SLURM_JOB_ID and SLURM_JOB_UID from the environment.

    Scripts in prolog.d and epilog.d, as `slurm-resil site render` writes them, start the same code in a tenth of the
    time.
    """


_CONFIG = click.option("--config", default=base.DEFAULT_CONFIG, show_default=True, help="hooks.json of the site.")


@hook.command("prolog")
@_CONFIG
def prolog_command(config: str) -> None:
    """Make the job's burst buffer directory."""
    sys.exit(base.main(prolog.prolog, ["--config", config]))


@hook.command("epilog")
@_CONFIG
def epilog_command(config: str) -> None:
    """Remove the job's burst buffer directory, unless it holds what is nowhere else."""
    sys.exit(base.main(epilog.epilog, ["--config", config]))
