"""Entry point of ``slurm-resil``: loads a group only when it is asked for, and maps errors to exit codes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import NoReturn

import click

from slurm_resil.core import errors

# command -> (module, attribute, one line of help); modules are imported on use, so that --help stays fast
COMMANDS = {
    "sandbox": ("slurm_resil.cli.sandbox", "sandbox", "A private real Slurm cluster in one directory."),
    "run": ("slurm_resil.cli.run", "run", "Launch and supervise ranks inside an allocation."),
    "agent": ("slurm_resil.cli.agent", "agent", "The per-node agent (started by the launcher)."),
    "mover": ("slurm_resil.cli.mover", "mover", "Drain over MPI (started by the launcher)."),
    "ckpt": ("slurm_resil.cli.ckpt", "ckpt", "Checkpoints on all tiers."),
    "job": ("slurm_resil.cli.job", "job", "One job: status, deadline, checkpoint now."),
    "engine": ("slurm_resil.cli.engine", "engine", "The recovery engine."),
    "hook": ("slurm_resil.cli.hook", "hook", "Prolog and epilog helpers."),
    "site": ("slurm_resil.cli.site", "site", "Check, render and install the site configuration."),
    "doctor": ("slurm_resil.cli.doctor", "doctor", "What works here, and the mend for what does not."),
    "bench": ("slurm_resil.cli.bench", "bench", "Measure on this system."),
}


class LazyGroup(click.Group):
    """A click group whose commands live in modules of their own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="slurm-resil")
def cli() -> None:
    """Keep training jobs on Slurm alive."""


def main() -> NoReturn:
    """Run the command line; exit codes are those of :mod:`slurm_resil.core.errors`."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        _json(error.format_message(), "", errors.EXIT_USAGE)
        error.show()
        sys.exit(errors.EXIT_USAGE)
    except click.Abort:
        sys.exit(130)
    except errors.ResilError as error:
        if not error.told:
            _json("\n".join([error.message, *getattr(error, "faults", ())]), error.mend, error.exit_code)
        click.echo(f"slurm-resil: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # the reader went away (`| head`): no traceback, and nothing more can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(errors.EXIT_FAILED)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise  # by a program's fault: nothing that a file system says
        code = errors.EXIT_NOT_PERMITTED if isinstance(error, PermissionError) else errors.EXIT_FAILED
        words = f"{os.fsdecode(error.filename or 'output')}: {error.strerror}"
        with contextlib.suppress(OSError):
            _json(words, "", code)
        click.echo(f"slurm-resil: {words}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written would be tried again at the end
        sys.exit(code)
    sys.exit(errors.EXIT_OK)


def _json(message: str, mend: str, code: int) -> None:
    """Say an error as JSON too, if that was asked for: whoever reads it gets an object in any case."""
    words = sys.argv[1:]
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        click.echo(json.dumps({"ok": False, "error": message, "mend": mend, "exit_code": code}))
