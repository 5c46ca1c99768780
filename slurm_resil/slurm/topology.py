"""Failure groups from the words for a topology: ``scontrol show topology``, topology.conf, topology.yaml. Pure.

The answers of releases 22.05 to 26.05, one line for each (a later release adds what is in brackets)::

    SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-4]
    SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n[1-8] Switches=s[0-1]
    BlockName=b1 BlockIndex=0 Nodes=n[1-4] [BlockSize=4]
    AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-8] BlockSize=8
    RingName=r1 Nodes=n[1-8] RingSize=8
    TorusName=t1 Dims=4x4x2 Nodes=n[1-32]

A leaf switch, a block, a ring and a torus are what fails together; the switches and blocks above them weigh less.

Source: src/plugins/topology/*/topology_*.c of each release, topology.conf(5), topology.yaml(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_resil.core.errors import ConfigError, ServiceError
from slurm_resil.core.failure_groups import Level
from slurm_resil.slurm.job import nodes_of

_NODES = r"(?: Nodes=(?P<nodes>\S*))?"
_ANSWERS = (
    re.compile(rf"(?P<kind>SwitchName)=(?P<name>\S+) Level=(?P<level>\d+) LinkSpeed=\d+{_NODES}(?: Switches=\S*)?"),
    re.compile(rf"(?P<kind>BlockName)=(?P<name>\S+) BlockIndex=\d+{_NODES}(?: BlockSize=\d+)?"),
    re.compile(rf"(?P<kind>AggregatedBlock)=(?P<name>\S+) BlockIndex=\d+{_NODES} BlockSize=(?P<level>\d+)"),
    re.compile(rf"(?P<kind>RingName)=(?P<name>\S+){_NODES} RingSize=\d+"),
    re.compile(rf"(?P<kind>TorusName)=(?P<name>\S+) Dims=\S+{_NODES}"),
)
_PLACEMENT = re.compile(r"TorusName=\S+ PlacementDims=.*")
_KINDS = {"SwitchName": "switch", "BlockName": "block", "AggregatedBlock": "block", "RingName": "ring"}
_CONF_KEYS = ("switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes", "ringname")
_CONF_NAMES = {"switchname": "switch", "blockname": "block", "ringname": "ring"}
_YAML_KINDS = {"tree": ("switches", "switch"), "block": ("blocks", "block"), "ring": ("rings", "ring")}
_DEEPEST = 20  # as in Slurm


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Something that nodes hang on.

    Attributes:
        kind: ``switch``, ``block``, ``ring`` or ``torus``.
        name: Its name.
        height: 0 for what nodes hang on directly; size of an aggregated block.
        nodes: All nodes below it.
    """

    kind: str
    name: str
    height: int
    nodes: tuple[str, ...]


def read_answer(text: str) -> tuple[Level, ...]:
    """Read what ``scontrol show topology`` says; nothing for an empty answer, of which the caller knows more.

    Raises:
        ServiceError: It is not understood.
    """
    units = []
    for line in text.splitlines():
        if not line.strip() or _PLACEMENT.fullmatch(line.strip()):
            continue
        found = next((match for form in _ANSWERS if (match := form.fullmatch(line.strip()))), None)
        if found is None:
            raise ServiceError(
                f"scontrol show topology says {line[:120]!r}, which is not understood",
                mend='name the failure groups in a file: failure_groups = "file:/etc/slurm-resil/groups.toml"',
            )
        said = found.groupdict()
        units.append(
            _Unit(
                kind=_KINDS.get(said["kind"], "torus"),
                name=said["name"],
                height=int(said.get("level") or 0),
                nodes=nodes_of(said["nodes"] or ""),
            )
        )
    return _levels(units)


def _levels(units: Iterable[_Unit]) -> tuple[Level, ...]:
    """Levels from the lowest up; a node that skips one is in the group that it was in below."""
    above: dict[int, dict[str, list[str]]] = {}
    kind = ""
    for unit in units:
        kind = unit.kind
        for node in unit.nodes:
            above.setdefault(unit.height, {}).setdefault(node, []).append(unit.name)
    groups: dict[str, str] = {}
    found = []
    for height in sorted(above):
        # a node on two switches lasts as long as one of them does: it fails with others that are on the same two
        groups = {**groups, **{node: "+".join(sorted(names)) for node, names in above[height].items()}}
        name = kind if not height else f"{kind} of {height} nodes" if kind == "block" else f"level-{height} {kind}"
        found.append(Level(name=name, groups=groups, minor=bool(height)))
    return tuple(found)


def read_conf(text: str, path: str) -> tuple[Level, ...]:
    """Read topology.conf.

    Raises:
        ConfigError: It has faults; all of them at once.
    """
    faults: list[str] = []
    units: list[tuple[str, str, str, str]] = []
    joined = re.sub(r"\\\n", " ", text)
    for number, line in enumerate(joined.splitlines(), start=1):
        words = line.partition("#")[0].split()
        values = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key.lower() not in _CONF_KEYS:
                faults.append(f"{path}, line {number}: {word!r} is not understood, as in SwitchName=s1 Nodes=node[1-8]")
            values[key.lower()] = value.strip('"')
        named = [key for key in _CONF_NAMES if key in values]
        if len(named) == 1:
            key = named[0]
            units.append((_CONF_NAMES[key], values[key], values.get("nodes", ""), values.get("switches", "")))
        elif words and not ("blocksizes" in values and not named) and not faults:
            faults.append(f"{path}, line {number}: one name is needed, of a switch, a block or a ring")
    return _built(units, path, faults)


def read_yaml(text: str, path: str, name: str = "") -> tuple[Level, ...]:
    """Read topology.yaml.

    Args:
        text: Its content.
        path: Its name.
        name: One of its topologies; empty: the cluster's default.

    Raises:
        ConfigError: PyYAML is not there, or the file has faults; all of them at once.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{path} cannot be read without PyYAML",
            mend='pip install PyYAML, or write failure_groups = "topology", which asks slurmctld',
            path=path,
        ) from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", mend="see topology.yaml(5)", path=path) from error
    if not isinstance(document, list) or not all(isinstance(one, dict) and "topology" in one for one in document):
        raise ConfigError(f"{path} is no list of topologies", mend="see topology.yaml(5)", path=path)
    chosen = _chosen(document, path, name)
    kinds = [kind for kind in (*_YAML_KINDS, "torus3d", "flat") if kind in chosen]
    if len(kinds) != 1:
        raise ConfigError(
            f"{path}: topology {chosen['topology']!r} is {' and '.join(kinds) or 'of no kind'}",
            mend="one of tree, block, ring, torus3d and flat is needed",
            path=path,
        )
    if kinds == ["flat"]:
        return ()
    body = chosen[kinds[0]]
    faults: list[str] = []
    units: list[tuple[str, str, str, str]] = []
    list_key, name_key = _YAML_KINDS.get(kinds[0], ("toruses", "name"))
    entries = body.get(list_key) if isinstance(body, dict) else None
    if not isinstance(entries, list) or not entries:
        faults.append(f"{path}: topology {chosen['topology']!r} has no {list_key}")
    for entry in entries if isinstance(entries, list) else ():
        unit = entry.get(name_key) if isinstance(entry, dict) else None
        if not isinstance(unit, str) or not unit:
            faults.append(f"{path}: {entry!r} in {list_key} has no {name_key}, as in {name_key}: s1")
            continue
        lists = [entry.get("nodes"), *(one.get("nodes") for one in entry.get("regions") or () if isinstance(one, dict))]
        nodes = ",".join(str(one) for one in lists if one)
        kind = "torus" if name_key == "name" else name_key
        units.append((kind, unit, nodes, str(entry.get("children") or "")))
    return _built(units, path, faults)


def _chosen(document: list[dict[str, Any]], path: str, name: str) -> dict[str, Any]:
    names = [str(one["topology"]) for one in document]
    if name:
        found = [one for one in document if str(one["topology"]) == name]
    else:
        found = [one for one in document if one.get("cluster_default") is True] or document[: len(document) == 1]
    if not found:
        which = f"no topology {name!r}" if name else "no topology with cluster_default"
        raise ConfigError(f"{path} has {which}, only {', '.join(names)}", mend="name one of these", path=path)
    return found[0]


def _built(units: list[tuple[str, str, str, str]], path: str, faults: list[str]) -> tuple[Level, ...]:
    """Levels from kind, name, nodes and children of each unit.

    Raises:
        ConfigError: There were faults, or there are.
    """
    below: dict[str, tuple[str, ...]] = {}
    nodes: dict[str, tuple[str, ...]] = {}
    for _, name, node_list, child_list in units:
        if name in nodes:
            faults.append(f"{path}: {name} is there twice")
        # as in Slurm: what has nodes of its own has no children
        nodes[name] = _expanded(node_list, f"nodes of {name}", path, faults)
        below[name] = () if node_list else _expanded(child_list, f"switches below {name}", path, faults)
    faults += [
        f"{path}: {child}, which is said to be below {name}, is not described"
        for name, children in below.items()
        for child in children
        if child not in below
    ]
    if len({kind for kind, *_ in units}) > 1:
        faults.append(f"{path}: switches, blocks and rings do not go together")
    if not units:
        faults.append(f"{path} describes nothing, as in SwitchName=s1 Nodes=node[1-8]")
    heights: dict[str, int] = {}
    if not faults:
        for name in below:
            if _height(name, below, heights, 0) > _DEEPEST:
                faults.append(f"{path}: {name} is below itself, or more than {_DEEPEST} levels are")
                break
    if faults:
        raise ConfigError(f"{path} cannot be used for failure groups", faults=tuple(faults), path=path)
    made = []
    for kind, name, _, _ in sorted(units, key=lambda unit: heights[unit[1]]):
        nodes[name] = nodes[name] or tuple(node for child in below[name] for node in nodes[child])
        made.append(_Unit(kind=kind, name=name, height=heights[name], nodes=tuple(dict.fromkeys(nodes[name]))))
    return _levels(made)


def _expanded(text: str, what: str, path: str, faults: list[str]) -> tuple[str, ...]:
    try:
        return nodes_of(text)
    except ServiceError as error:
        faults.append(f"{path}: {what}: {error.message}")
        return ()


def _height(name: str, below: Mapping[str, tuple[str, ...]], heights: dict[str, int], depth: int) -> int:
    if name not in heights:
        if depth > _DEEPEST:
            return depth
        heights[name] = max((1 + _height(child, below, heights, depth + 1) for child in below[name]), default=0)
    return heights[name]
