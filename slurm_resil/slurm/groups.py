"""Failure groups of the nodes of a job, from where the site says they are to be found.

What cannot be found out is unknown, and told: it is not the same as a site whose nodes all fail alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_resil.core.errors import ConfigError, ResilError, ServiceError
from slurm_resil.core.failure_groups import AUTO, FEATURE, FILE, NONE, Level, Source
from slurm_resil.slurm import topology
from slurm_resil.slurm.job import nodes_of
from slurm_resil.slurm.scontrol import Commands, fields, host_list

_FLAT = ("topology/none", "topology/default", "topology/flat")
_EXAMPLE = 'as in [rack] and below it r1 = "node[1-8]"'


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is known about nodes that fail together.

    Attributes:
        levels: Levels, that which matters most first; empty: nodes fail alone, or nothing is known.
        words: What was asked and what it said, for each source that answered.
        unknown: Why nothing is known, for each source that did not.
    """

    levels: tuple[Level, ...] = ()
    words: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def find(sources: Iterable[Source], nodes: Sequence[str], commands: Commands | None, *, partition: str = "") -> Found:
    """Look for the failure groups of nodes; a source that fails is ``unknown`` in what is returned.

    Args:
        sources: Where to look.
        nodes: Nodes of the job.
        commands: Slurm's commands; None: there is no Slurm here.
        partition: Partition of the job: from 25.05 on it may have a topology of its own.
    """
    levels: list[Level] = []
    words: list[str] = []
    unknown: list[str] = []
    for source in sources:
        try:
            made, said = _of(source, nodes, commands, partition)
        except ResilError as error:
            unknown.append(str(error))
            continue
        levels += made
        words.append(said)
    return Found(levels=tuple(levels), words=tuple(words), unknown=tuple(unknown))


def _of(
    source: Source, nodes: Sequence[str], commands: Commands | None, partition: str
) -> tuple[tuple[Level, ...], str]:
    if source.kind == NONE:
        return (), "the site says that nodes fail alone"
    if source.kind == FILE:
        return read_file(source.argument), source.argument
    if commands is None:
        if source.kind == AUTO:
            return (), "there is no Slurm here"
        raise ServiceError(f"failure_groups is '{source}', and there is no Slurm here to ask")
    if source.kind == FEATURE:
        return (_features(source.argument, nodes, commands),), f"features like {source.argument}"
    return _topology(source, commands, partition)


def _topology(source: Source, commands: Commands, partition: str) -> tuple[tuple[Level, ...], str]:
    name = source.argument or (commands.show("partition", partition).get("Topology", "") if partition else "")
    argv = ("scontrol", "show", "topology", *((name,) if name else ()))
    levels = topology.read_answer(commands.run(*argv))
    if levels:
        return levels, " ".join(argv)
    plugin = commands.config().get("TopologyPlugin", "")
    if source.argument:
        raise ConfigError(
            f"Slurm has no topology {source.argument!r} with groups: {' '.join(argv)} says nothing",
            mend="from 25.05 on topology.yaml names topologies; before, leave the name out",
        )
    if plugin in _FLAT:
        if source.kind == AUTO:
            return (), f"Slurm has no topology ({plugin})"
        raise ConfigError(
            f"failure_groups is '{source}', and Slurm has no topology ({plugin})",
            mend="set TopologyPlugin and topology.conf, or name the groups in a file",
        )
    raise ServiceError(f"{' '.join(argv)} says nothing, and TopologyPlugin is {plugin or 'not known'}")


def _features(pattern: str, nodes: Sequence[str], commands: Commands) -> Level:
    """Groups by the one feature of each node that a pattern matches.

    Raises:
        ConfigError: No node has such a feature, or one has several.
        ServiceError: Slurm does not answer.
    """
    form = re.compile(pattern)
    wanted = set(nodes)
    groups: dict[str, str] = {}
    seen: set[str] = set()
    odd = []
    for line in commands.run("scontrol", "-o", "show", "node", host_list(nodes)).splitlines():
        node = fields(line)
        if node.get("NodeName") not in wanted:
            continue
        features = set(node.get("AvailableFeatures", "").split(",")) - {"", "(null)"}
        seen |= features
        matched = sorted({match[1] for feature in features if (match := form.fullmatch(feature)) and match[1]})
        if len(matched) > 1:
            odd.append(f"{node['NodeName']} is in {' and '.join(matched)}")
        elif matched:
            groups[node["NodeName"]] = matched[0]
    if odd:
        raise ConfigError(
            f"more than one feature of a node matches {pattern!r}",
            mend="write a pattern that matches one feature of each node",
            faults=tuple(odd[:8]),
        )
    if not groups:
        has = f"they have {', '.join(sorted(seen)[:8])}" if seen else "they have no features"
        raise ConfigError(
            f"no feature of the nodes matches {pattern!r}: {has}",
            mend='write Features=rack=r1 at the nodes in slurm.conf and failure_groups = "feature:rack=(.+)"',
        )
    literal = re.match(r"[A-Za-z]+", pattern)
    return Level(name=literal[0] if literal else "group", groups=groups)


def read_file(path: str) -> tuple[Level, ...]:
    """Read a file of failure groups: groups.toml, topology.conf or topology.yaml, by the end of its name.

    Raises:
        ConfigError: It cannot be read, or has faults; all of them at once.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"cannot read the failure groups in {path}: {why}", mend="make it readable for all, on all nodes", path=path
        ) from error
    if path.endswith(".conf"):
        return topology.read_conf(text, path)
    if path.endswith((".yaml", ".yml")):
        return topology.read_yaml(text, path)
    return read_groups(text, path)


def read_groups(text: str, path: str) -> tuple[Level, ...]:
    """Read a groups.toml: a section for each level, that which matters most first; a line for each group.

    ::

        [rack]
        r1 = "node[1-8]"
        r2 = ["node[9-12]", "node14"]
        [power]
        left = "node[1-4,9-12]"

    Raises:
        ConfigError: It has faults; all of them at once.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", mend=f"write levels and groups, {_EXAMPLE}", path=path
        ) from error
    faults: list[str] = []
    levels = []
    for name, table in document.items():
        if not isinstance(table, dict) or not table:
            faults.append(f"{path}: {name} is {table!r}: a section with groups is needed, {_EXAMPLE}")
            continue
        groups: dict[str, str] = {}
        for group, value in table.items():
            texts = value if isinstance(value, list) else [value]
            if not texts or not all(isinstance(one, str) and one for one in texts):
                faults.append(f"{path}: [{name}] {group} is {value!r}: nodes are needed, {_EXAMPLE}")
                continue
            try:
                members = [node for one in texts for node in nodes_of(one)]
            except ServiceError as error:
                faults.append(f"{path}: [{name}] {group} is {value!r}: {error.message}")
                continue
            twice = [node for node in members if groups.setdefault(node, group) != group]
            if twice:
                faults.append(f"{path}: [{name}] {group}: {', '.join(twice[:8])} in {groups[twice[0]]} already")
        levels.append(Level(name=name, groups=groups))
    if not document:
        faults.append(f"{path} has no groups, {_EXAMPLE}")
    if faults:
        raise ConfigError(f"{path} cannot be used for failure groups", faults=tuple(faults), path=path)
    return tuple(levels)
