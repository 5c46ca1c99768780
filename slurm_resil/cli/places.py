"""Where a command looks for checkpoints: options, else the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_resil.agent.place import from_env
from slurm_resil.core import errors
from slurm_resil.core.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def names(directory: str) -> list[str]:
    """Sorted names in a directory, none if it is not there.

    Raises:
        ConfigError: It cannot be listed.
    """
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise errors.ConfigError(f"cannot list {directory}: {error.strerror}", path=directory) from error


def places(function: F) -> F:
    """Add the options to a command."""
    run = click.option("--run-dir", help="Run's directory on the parallel file system; default: from the environment.")
    job = click.option("--job-dir", help="Job's directory in the burst buffer; default: from the environment.")
    return run(job(function))


def resolve(run_dir: str | None, job_dir: str | None) -> tuple[str, str | None]:
    """Fill in from the environment what was not given; with a run's directory alone only that tier is looked at.

    Raises:
        ConfigError: The run's directory does not exist.
        UsageError: No run is named, and this is no job.
    """
    if run_dir is not None:
        if not job_dir and not os.path.isdir(run_dir):
            raise errors.missing_path(run_dir, "the run's directory", "name another one with --run-dir")
        return run_dir, job_dir
    place = from_env(os.environ)
    if "SLURM_JOB_ID" not in os.environ and not os.environ.get("SLURM_RESIL_RUN_ID"):
        root = os.path.dirname(place.run_dir)
        runs = [name for name in names(root) if os.path.isdir(os.path.join(root, name))]
        there = f"in {root} there are: {', '.join(runs)}" if runs else f"there is none in {root}"
        raise UsageError("no run is named, and this is no job", mend=f"say --run-dir; {there}")
    return place.run_dir, job_dir or place.job_dir
