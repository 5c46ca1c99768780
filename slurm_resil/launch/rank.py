"""``python -m slurm_resil.launch.rank -- COMMAND...``: becomes the user's command, as one rank.

Started by srun once per rank. It finds the rank by the *name* of its node, not by Slurm's task number, which changes
when a node is replaced; ignores the signals that Slurm sends in a grace period (an ignored signal stays ignored over
exec, and without that the ranks would die the moment the grace period starts); and execs the command. Standard
library only: it runs on every rank before the training starts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NoReturn

IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_CONFIG = 126, 127, 78

# set by the launcher; `@path` names a file with the names, for lists that do not fit one variable
LAYOUT = "SLURM_RESIL_LAYOUT"
LOCAL_RANK = "SLURM_RESIL_LOCAL_RANK"


class PlaceError(Exception):
    """This process cannot tell which rank it is."""


def read_layout(value: str) -> list[str]:
    """Node names by node_rank: comma-separated, or in the file named after ``@``."""
    if value.startswith("@"):
        with open(value[1:], encoding="utf-8") as file:
            value = file.read().strip()
    return [name for name in value.split(",") if name]


def place(env: Mapping[str, str]) -> tuple[int, int, int]:
    """Find this process's place.

    Returns:
        node_rank, local_rank, ranks per node.

    Raises:
        PlaceError: A variable is missing or makes no sense, or this node is not in the layout.
    """
    try:
        nodes = read_layout(env[LAYOUT])
        per_node = int(env["SLURM_RESIL_RANKS_PER_NODE"])
        local_rank = int(env.get(LOCAL_RANK) or env["SLURM_LOCALID"])
        node = env["SLURMD_NODENAME"]
    except KeyError as error:
        raise PlaceError(f"{error.args[0]} is not set: this is started by `slurm-resil run`, not by hand") from error
    except (ValueError, OSError) as error:
        raise PlaceError(str(error)) from error
    if node not in nodes:
        raise PlaceError(f"node {node} is not in the layout {','.join(nodes)}")
    if not 0 <= local_rank < per_node:
        raise PlaceError(f"local rank {local_rank} on {node}, where {per_node} ranks were wanted")
    return nodes.index(node), local_rank, per_node


def fill(env: MutableMapping[str, str]) -> None:
    """Add the variables that PyTorch and our own session read, in place.

    Raises:
        PlaceError: See :func:`place`.
    """
    node_rank, local_rank, per_node = place(env)
    world = len(read_layout(env[LAYOUT])) * per_node
    env.update(
        RANK=str(node_rank * per_node + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(per_node),
        GROUP_RANK=str(node_rank),
        SLURM_RESIL_NODE_RANK=str(node_rank),
        SLURM_RESIL_WORLD_SIZE=str(world),
    )


def die_with_parent() -> None:
    """Be killed when the launcher is, without Slurm to do that; holds over exec."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


def run(argv: Sequence[str], env: MutableMapping[str, str]) -> NoReturn:
    """Become the command."""
    try:
        fill(env)
    except PlaceError as error:
        sys.stderr.write(f"slurm-resil: {error}\n")
        sys.exit(EXIT_CONFIG)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if LOCAL_RANK in env:
        die_with_parent()
    try:
        os.execvpe(argv[0], list(argv), env)  # noqa: S606 - the user's own command, as the user
    except FileNotFoundError:
        sys.stderr.write(f"slurm-resil: {argv[0]}: no such command\n")
        sys.exit(EXIT_NOT_FOUND)
    except OSError as error:
        sys.stderr.write(f"slurm-resil: {argv[0]}: {error.strerror}\n")
        sys.exit(EXIT_NOT_EXECUTABLE)


def main() -> NoReturn:
    """Entry point."""
    argv = sys.argv[1:]
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        sys.stderr.write("usage: python -m slurm_resil.launch.rank -- COMMAND...\n")
        sys.exit(2)
    run(argv, os.environ)


if __name__ == "__main__":
    main()
