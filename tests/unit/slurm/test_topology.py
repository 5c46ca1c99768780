"""Topologies as scontrol of 22.05 to 26.05 prints them, and as topology.conf and topology.yaml describe them."""

from __future__ import annotations

import sys

import pytest

from slurm_resil.core.errors import ConfigError, ServiceError
from slurm_resil.core.failure_groups import Level
from slurm_resil.slurm import topology

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]
SwitchName=s3 Level=0 LinkSpeed=1 Nodes=n5
SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-5] Switches=s[2-3]
"""
BLOCK_23 = "BlockName=b1 BlockIndex=0 Nodes=n[1-2]\nBlockName=b2 BlockIndex=1 Nodes=n[3-4]\n"  # 23.11, 24.05
BLOCK_24 = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=n5 BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=n[1-4] BlockSize=4
AggregatedBlock=b3 BlockIndex=4 Nodes=n5 BlockSize=4
"""
RING = "RingName=r1 Nodes=n[1-2] RingSize=2\nRingName=r2 Nodes=n[3-4] RingSize=2\n"
TORUS = "TorusName=pod1 Dims=2x2x1 Nodes=n[1-4]\n  TorusName=pod1 PlacementDims=2x1x1(2) Anchors=2\n"
CONF = """\
# the same as TREE
SwitchName=s0 Nodes=n[1-2] LinkSpeed=10
switchname=s1 nodes=n[3-4]  # in any case
SwitchName=s2 \\
  Switches=s[0-1]
SwitchName=s3 Nodes="n5"
SwitchName=top Switches=s[2-3]
"""
YAML = """\
---
- topology: ib
  cluster_default: true
  tree:
    switches:
      - switch: s0
        nodes: n[1-2]
      - switch: s1
        nodes: n[3-4]
      - switch: s2
        children: s[0-1]
      - switch: s3
        nodes: n5
      - switch: top
        children: s[2-3]
- topology: nvl
  block:
    block_sizes: [2, 4]
    blocks:
      - block: b1
        nodes: n[1-2]
      - block: b2
        nodes: n[3-4]
- topology: plain
  flat: true
- topology: rings
  ring:
    rings:
      - ring: r1
        nodes: n[1-2]
      - ring: r2
        nodes: n[3-4]
- topology: tpu
  torus3d:
    toruses:
      - name: pod1
        dims: {x: 2, y: 2, z: 1}
        regions:
          - anchor: {x: 0, y: 0, z: 0}
            nodes: n[1-2]
          - nodes: n[3-4]
"""
LEAVES = {"n1": "s0", "n2": "s0", "n3": "s1", "n4": "s1", "n5": "s3"}
TREE_LEVELS = (
    Level(name="switch", groups=LEAVES),
    # n5 hangs on the top switch by a leaf: below that it is in no other group than that leaf's
    Level(name="level-1 switch", groups={**dict.fromkeys(("n1", "n2", "n3", "n4"), "s2"), "n5": "s3"}, minor=True),
    Level(name="level-2 switch", groups=dict.fromkeys(LEAVES, "top"), minor=True),
)
PAIRS = {"n1": "b1", "n2": "b1", "n3": "b2", "n4": "b2"}


def test_a_tree() -> None:
    assert topology.read_answer(TREE) == TREE_LEVELS


def test_blocks_of_either_form() -> None:
    assert topology.read_answer(BLOCK_23) == (Level(name="block", groups=PAIRS),)
    base, wide = topology.read_answer(BLOCK_24)
    assert base == Level(name="block", groups={**PAIRS, "n5": "b3"})
    assert wide == Level(name="block of 4 nodes", groups={**dict.fromkeys(PAIRS, "b[1-2]"), "n5": "b3"}, minor=True)


def test_rings_and_toruses() -> None:
    (ring,) = topology.read_answer(RING)
    assert ring == Level(name="ring", groups={"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2"})
    assert topology.read_answer(TORUS) == (Level(name="torus", groups=dict.fromkeys(PAIRS, "pod1")),)


def test_a_node_on_two_leaf_switches_fails_with_those_on_the_same_two() -> None:
    text = "SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1-3]\nSwitchName=b Level=0 LinkSpeed=1 Nodes=n[2-3]\n"
    (level,) = topology.read_answer(text)
    assert level.groups == {"n1": "a", "n2": "a+b", "n3": "a+b"}


def test_nothing_is_nothing_and_empty_switches_hold_nobody() -> None:
    assert topology.read_answer("") == topology.read_answer("\n") == ()
    for empty in ("SwitchName=s Level=0 LinkSpeed=1", "SwitchName=s Level=0 LinkSpeed=1 Nodes="):
        assert topology.read_answer(empty) == ()


@pytest.mark.parametrize(
    "line",
    [
        "No topology information available",
        "SwitchName=s0 Level=0",
        "SwitchName=s0 Level=x LinkSpeed=1 Nodes=n1",
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-",
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n1 Switches=s1 Weight=3",
        "BlockName=b1 Nodes=n1",
        "RackName=r1 Nodes=n1",
    ],
)
def test_what_is_not_understood_is_unknown_and_not_empty(line: str) -> None:
    with pytest.raises(ServiceError):
        topology.read_answer(TREE + line)


def test_a_conf_says_the_same() -> None:
    assert topology.read_conf(CONF, "/etc/slurm/topology.conf") == TREE_LEVELS
    blocks = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n"
    assert topology.read_conf(blocks, "t.conf") == (Level(name="block", groups=PAIRS),)
    rings = "RingName=r1 Nodes=n[1-2]\nRingName=r2 Nodes=n[3-4]\n"
    assert topology.read_conf(rings, "t.conf") == topology.read_answer(RING)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "describes nothing"),
        ("SwitchName=s1 Nodes=n1\ninclude other.conf", "t.conf, line 2: 'include' is not understood"),
        ("SwitchName=s1 Nodes=n1\nNodes=n2", "line 2: one name is needed"),
        ("SwitchName=s1 BlockName=b1 Nodes=n2", "line 1: one name is needed"),
        ("SwitchName=s1 Nodes=n[1-", "nodes of s1"),
        ("SwitchName=s1 Nodes=n1\nSwitchName=s1 Nodes=n2", "s1 is there twice"),
        ("SwitchName=s1 Switches=s2", "s2, which is said to be below s1, is not described"),
        ("SwitchName=s1 Switches=s2\nSwitchName=s2 Switches=s1", "is below itself"),
        ("SwitchName=s1 Switches=s1", "is below itself"),
        ("SwitchName=s1 Nodes=n1\nBlockName=b1 Nodes=n2", "do not go together"),
    ],
)
def test_a_conf_with_faults(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology.read_conf(text, "t.conf")
    assert any(said in fault and "t.conf" in fault for fault in caught.value.faults), caught.value.faults


def test_yaml_says_the_same() -> None:
    pytest.importorskip("yaml")
    assert topology.read_yaml(YAML, "t.yaml") == topology.read_yaml(YAML, "t.yaml", "ib") == TREE_LEVELS
    assert topology.read_yaml(YAML, "t.yaml", "nvl") == (Level(name="block", groups=PAIRS),)
    assert topology.read_yaml(YAML, "t.yaml", "rings") == topology.read_answer(RING)
    assert topology.read_yaml(YAML, "t.yaml", "tpu") == topology.read_answer(TORUS)
    assert topology.read_yaml(YAML, "t.yaml", "plain") == ()


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("a: [", "", "is not YAML"),
        ("a: 1", "", "is no list of topologies"),
        (YAML, "opa", "no topology 'opa', only ib, nvl"),
        ("- topology: a\n  flat: true\n- topology: b\n  flat: true\n", "", "no topology with cluster_default"),
        ("- topology: a\n", "", "is of no kind"),
        ("- topology: a\n  flat: true\n  tree: {}\n", "", "tree and flat"),
        ("- topology: a\n  tree: true\n", "", "has no switches"),
        ("- topology: a\n  tree: {switches: [{nodes: n1}]}\n", "", "has no switch"),
        ("- topology: a\n  tree: {switches: [{switch: s, children: x}]}\n", "", "x, which is said to be below s"),
    ],
)
def test_yaml_with_faults(text: str, name: str, said: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(ConfigError) as caught:
        topology.read_yaml(text, "t.yaml", name)
    assert said in str(caught.value) and "t.yaml" in str(caught.value)


def test_without_pyyaml_it_is_said_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="without PyYAML") as caught:
        topology.read_yaml(YAML, "t.yaml")
    assert "asks slurmctld" in caught.value.mend
