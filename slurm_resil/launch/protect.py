"""How the checkpoints of a job are protected: what is chosen, and which nodes protect each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_resil.core import config
from slurm_resil.core import sets as node_sets
from slurm_resil.core.layout import Layout
from slurm_resil.core.settings import Settings
from slurm_resil.launch.encodes import Chosen, Uniform
from slurm_resil.redundancy import sets as making
from slurm_resil.slurm import groups
from slurm_resil.slurm.scontrol import Commands


@dataclass(frozen=True, kw_only=True)
class Protected:
    """What came of it.

    Attributes:
        chosen: What is done for which checkpoint.
        sets: Nodes that protect each other; empty: nothing is protected.
        warnings: What people should know.
    """

    chosen: Chosen
    sets: tuple[tuple[str, ...], ...] = ()
    warnings: tuple[str, ...] = ()


def plan(held: Settings, env: Mapping[str, str], layout: Layout, run_dir: str, *, local: bool) -> Protected:
    """Make the sets of an attempt, and write them where movers find them.

    Nodes that had been in a set before stay in it where that is as good.

    Args:
        held: Settings of the job.
        env: Environment of the launcher.
        layout: Places of the nodes.
        run_dir: Run's directory.
        local: There is no Slurm.

    Raises:
        ConfigError: The site's configuration makes no sense.
        OSError: The file cannot be written.
    """
    chosen = held.redundancy.value
    if not chosen.protects:
        node_sets.remove(run_dir)
        return Protected(chosen=chosen)
    before = node_sets.of_run(run_dir)  # one that cannot be read is no reason not to make new ones
    commands = None if local else Commands(env)
    made, found = look(
        held,
        config.load(env),
        layout.nodes,
        commands,
        partition=env.get("SLURM_JOB_PARTITION", ""),
        before=before.sets if before else (),
    )
    unknown = tuple(f"which nodes fail together is not known: {words}" for words in found.unknown)
    if not made.protected:
        node_sets.remove(run_dir)
        why = () if chosen.auto else tuple(f"checkpoints are not protected: {note}" for note in made.notes)
        return Protected(chosen=Uniform(), warnings=why)
    node_sets.save(run_dir, made.members, chosen.strongest)
    return Protected(chosen=chosen, sets=made.members, warnings=(*unknown, *made.warnings))


def look(
    held: Settings,
    site: config.Site,
    nodes: Sequence[str],
    commands: Commands | None,
    *,
    partition: str = "",
    before: Sequence[Sequence[str]] = (),
) -> tuple[making.Sets, groups.Found]:
    """Make the sets of nodes as a job with these settings gets them; returns what is known of failure groups, too.

    Args:
        held: Settings of the job.
        site: The site's configuration.
        nodes: Names, by node_rank.
        commands: Slurm's commands; None: there is no Slurm.
        partition: Partition of the job.
        before: Sets of the attempt before.
    """
    sources = () if commands is None else site.redundancy.failure_groups
    found = groups.find(sources, nodes, commands, partition=partition)
    scheme, size = held.redundancy.value.strongest, held.set_size.value
    return making.make(nodes, found.levels, scheme=scheme, size=size, before=before), found


@dataclass(frozen=True, kw_only=True)
class Described:
    """What protection a job on some nodes gets, for people.

    Attributes:
        words: Sentences.
        warnings: What is not as it could be, with numbers.
        unknown: Why it is not known which nodes fail together.
    """

    words: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def describe(
    held: Settings, site: config.Site, nodes: Sequence[str], commands: Commands | None, *, partition: str = ""
) -> Described:
    """Say what protection a job gets, see :func:`look`."""
    chosen = held.redundancy.value
    if not chosen.protects:
        costs = f"scheme is {chosen}: the loss of a node costs what was not drained"
        return Described(words=(f'{costs}; [redundancy] scheme = "auto" or SLURM_RESIL_REDUNDANCY=auto protects it',))
    made, found = look(held, site, nodes, commands, partition=partition)
    if not made.protected:
        return Described(words=(f"scheme is {chosen}, and nothing is protected: {'; '.join(made.notes)}",))
    scheme, small, large = made.scheme, made.smallest, max(map(len, made.members))
    losses = min(scheme.losses, small - 1)
    sizes = f"{small}" if small == large else f"{small} to {large}"
    percent = node_sets.parity_bytes(scheme, small, 1000) / 10
    words = [
        f"scheme is {chosen}: {len(made.members)} {'set' if len(made.members) == 1 else 'sets'} of {sizes} nodes, each "
        f"survives the loss of {losses} of its nodes; parity of a checkpoint takes {percent:.0f} % of a node's state, "
        f"and {node_sets.PARITIES} times that at most"
    ]
    for level in found.levels:
        count = len({level.groups[node] for node in nodes if node in level.groups})
        words.append(f"failure groups: {count} of {level.name}")
    words += [f"failure groups by {said}" for said in found.words]
    return Described(words=(*words, *made.notes), warnings=made.warnings, unknown=found.unknown)
