"""Where a command looks for checkpoints: options, else the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_resil.agent.place import from_env
from slurm_resil.core import errors
from slurm_resil.core.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


job_option = click.option(
    "--job",
    "job_id",
    type=click.IntRange(min=1),
    help="The run of this job, by Slurm's record of where it was submitted.",
)
here_option = click.option("--here", is_flag=True, help="Look at this node alone, and do not ask the job's others.")


def examples(*lines: str) -> str:
    """What ``--help`` shows at its end, line by line as it is."""
    return "\b\n" + "\n".join(["Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)])


def names(directory: str) -> list[str]:
    """Sorted names in a directory, none if it is not there.

    Raises:
        NotPermittedError: This user may not list it.
        ConfigError: It cannot be listed otherwise.
    """
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise errors.NotPermittedError(
            f"cannot list {directory}: {error.strerror}", mend="be its owner", path=directory
        ) from error
    except OSError as error:
        raise errors.ConfigError(f"cannot list {directory}: {error.strerror}", path=directory) from error


def there(path: str, what: str, mend: str) -> None:
    """Make sure that a directory is there.

    Raises:
        NotPermittedError: This user may not look.
        ConfigError: It is not there, or is no directory.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return
    except PermissionError as error:
        raise errors.NotPermittedError(f"cannot look at {what} {path}: {error.strerror}", mend=mend) from error
    except (OSError, ValueError) as error:
        raise errors.missing_path(path or "''", what, mend) from error
    raise errors.ConfigError(f"{what} {path} is no directory", mend=mend, path=path)


def places(function: F) -> F:
    """Add the options to a command."""
    run = click.option("--run-dir", help="Run's directory on the parallel file system; default: from the environment.")
    job = click.option("--job-dir", help="Job's directory in the burst buffer; default: from the environment.")
    return run(job(function))


def resolve(run_dir: str | None, job_dir: str | None) -> tuple[str, str | None]:
    """Fill in from the environment what was not given; with one directory alone only that tier is looked at.

    Raises:
        ConfigError: The directory does not exist.
        UsageError: No run is named, and this is no job.
    """
    if run_dir is not None:
        if not job_dir:
            there(run_dir, "the run's directory", "name another one with --run-dir")
        return run_dir, job_dir
    place = from_env(os.environ)
    if "SLURM_JOB_ID" not in os.environ and not os.environ.get("SLURM_RESIL_RUN_ID"):
        if job_dir is not None:  # shards alone, as of a save of async_save: there is nothing drained in it
            there(job_dir, "the job's directory", "name another one with --job-dir")
            return job_dir, job_dir
        root = os.path.dirname(place.run_dir)
        runs = [name for name in names(root) if os.path.isdir(os.path.join(root, name))]
        listed = f"in {root} there are: {', '.join(runs)}" if runs else f"there is none in {root}"
        raise UsageError("no run is named, and this is no job", mend=f"say --run-dir; {listed}")
    return place.run_dir, job_dir or place.job_dir
