"""Failure groups from every source that a site can name; what is not known is never taken for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resil.core.errors import ConfigError, ServiceError
from slurm_resil.core.failure_groups import Level, Source
from slurm_resil.slurm.groups import Found, find, read_groups
from slurm_resil.slurm.scontrol import Commands, host_list

NODES = ["n1", "n2", "n3"]
TREE = "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=n3\n"
SWITCHES = (Level(name="switch", groups={"n1": "s0", "n2": "s0", "n3": "s1"}),)
NODE = (
    "NodeName={} Arch=x86_64 AvailableFeatures={} ActiveFeatures={} Gres=(null) NodeAddr=10.0.0.1 Version=22.05.8"
    " State=IDLE Partitions=train Comment=AvailableFeatures=rack=forged\n"
)
CONFIG = "Configuration data as of now\nTopologyParam           = (null)\nTopologyPlugin          = {}\n"


class Said(Commands):
    """Commands that say what the test wants; everything else is not answered."""

    def __init__(self, said: dict[str, str | Exception]) -> None:
        super().__init__({})
        self._said = said

    def run(self, *argv: str) -> str:
        answer = self._said.get(" ".join(argv[1:]), ServiceError(f"{' '.join(argv)} is not answered"))
        if isinstance(answer, Exception):
            raise answer
        return answer


def look(text: str, said: dict[str, str | Exception] | None = None, partition: str = "") -> Found:
    return find([Source.parse(text)], NODES, Said(said or {}), partition=partition)


def test_auto_takes_the_topology_that_slurm_has() -> None:
    found = look("auto", {"show topology": TREE})
    assert found == Found(levels=SWITCHES, words=("scontrol show topology",))


@pytest.mark.parametrize("plugin", ["topology/none", "topology/default", "topology/flat"])
def test_a_site_without_a_topology_is_no_fault_unless_it_was_asked_for(plugin: str) -> None:
    said: dict[str, str | Exception] = {"show topology": "", "show config": CONFIG.format(plugin)}
    assert look("auto", said) == Found(words=(f"Slurm has no topology ({plugin})",))
    (words,) = look("topology", said).unknown
    assert plugin in words and "TopologyPlugin" in words


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "scontrol show topology is not answered"),
        ({"show topology": ""}, "scontrol show config is not answered"),
        ({"show topology": "", "show config": CONFIG.format("topology/tree")}, "TopologyPlugin is topology/tree"),
        ({"show topology": "", "show config": CONFIG.format("topology/3d_torus")}, "topology/3d_torus"),
        ({"show topology": "", "show config": "nothing"}, "TopologyPlugin is not known"),
        ({"show topology": "RackName=r1"}, "not understood"),
    ],
)
def test_no_answer_and_half_an_answer_are_unknown(said: dict[str, str | Exception], words: str) -> None:
    for text in ("auto", "topology"):
        found = look(text, said)
        assert found.levels == found.words == ()
        assert words in found.unknown[0]


def test_a_partition_of_25_05_has_a_topology_of_its_own() -> None:
    said: dict[str, str | Exception] = {
        "-o show partition gpu": "PartitionName=gpu AllowGroups=ALL State=UP Topology=nvl",
        "-o show partition cpu": "PartitionName=cpu AllowGroups=ALL State=UP",
        "show topology nvl": "BlockName=b1 BlockIndex=0 Nodes=n[1-3] BlockSize=4\n",
        "show topology": TREE,
    }
    assert look("auto", said, "gpu").levels == (Level(name="block", groups=dict.fromkeys(NODES, "b1")),)
    assert look("topology:nvl", said, "cpu").words == ("scontrol show topology nvl",)
    assert look("auto", said, "cpu").levels == SWITCHES
    (words,) = look("topology:ib", {"show topology ib": "", "show config": CONFIG.format("topology/tree")}).unknown
    assert "no topology 'ib'" in words


def nodes(*features: str) -> dict[str, str | Exception]:
    lines = [NODE.format(name, features, features) for name, features in zip(NODES, features, strict=True)]
    return {"-o show node n[1-3]": "".join(lines)}


def test_features() -> None:
    found = look("feature:rack=(.+)", nodes("gpu,rack=r1", "rack=r1,big", "rack=r2"))
    assert found.levels == (Level(name="rack", groups={"n1": "r1", "n2": "r1", "n3": "r2"}),)
    found = look("feature:(c[0-9]+)u.*", nodes("c1u7", "c2u9", "(null)"))
    assert found.levels == (Level(name="group", groups={"n1": "c1", "n2": "c2"}),)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (("gpu", "big", "(null)"), "they have big, gpu"),
        (("(null)", "(null)", "(null)"), "they have no features"),
        (("rack=r1,rack=r2", "rack=r1", "rack=r1"), "n1 is in r1 and r2"),
    ],
)
def test_features_that_say_nothing_or_too_much(features: tuple[str, ...], said: str) -> None:
    (words,) = look("feature:rack=(.+)", nodes(*features)).unknown
    assert said in words


def test_without_slurm() -> None:
    assert find([Source.parse("auto")], NODES, None).unknown == ()
    for text in ("topology", "feature:rack=(.+)"):
        assert "no Slurm here" in find([Source.parse(text)], NODES, None).unknown[0]


def test_several_sources_and_one_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "groups.toml"
    path.write_text('[rack]\nr1 = "n[1-2]"\nr2 = ["n3", "n4"]\n[power]\nleft = "n[1,3]"\n')
    sources = [Source.parse(f"file:{path}"), Source.parse("topology")]
    found = find(sources, NODES, Said({"show topology": TREE}))
    assert [level.name for level in found.levels] == ["rack", "power", "switch"]
    assert found.levels[0].groups == {"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2"}
    found = find(sources, NODES, Said({}))
    assert ([level.name for level in found.levels], len(found.unknown)) == (["rack", "power"], 1)
    assert look("none") == Found(words=("the site says that nodes fail alone",))


def test_files_by_the_end_of_their_names(tmp_path: Path) -> None:
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=s0 Nodes=n[1-2]\nSwitchName=s1 Nodes=n3\n")
    assert look(f"file:{conf}").levels == SWITCHES
    pytest.importorskip("yaml")
    path = tmp_path / "topology.yaml"
    path.write_text("- topology: a\n  tree: {switches: [{switch: s0, nodes: 'n[1-2]'}, {switch: s1, nodes: n3}]}\n")
    assert look(f"file:{path}").levels == SWITCHES


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in look(f"file:{tmp_path}/a.toml").unknown[0]
    path = tmp_path / "b.toml"
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in look(f"file:{path}").unknown[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no groups"),
        ("[rack]\n", "rack is {}: a section with groups is needed"),
        ('rack = "n1"', "a section with groups is needed"),
        ("[rack]\nr1 = 5", "[rack] r1 is 5: nodes are needed"),
        ("[rack]\nr1 = []", "[rack] r1 is []"),
        ('[rack]\nr1 = "n[1-"', "[rack] r1 is 'n[1-'"),
        ('[rack]\nr1 = "n[1-2]"\nr2 = "n[2-3]"', "[rack] r2: n2 in r1 already"),
    ],
)
def test_a_file_of_groups_with_faults(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_groups(text, "/etc/g.toml")
    (words,) = caught.value.faults
    assert said in words and "/etc/g.toml" in words


def test_all_faults_of_a_file_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_groups('[rack]\nr1 = 5\nr2 = ""\n[power]\n', "/etc/g.toml")
    assert len(caught.value.faults) == 3
    with pytest.raises(ConfigError, match="is not TOML"):
        read_groups("r1 = n1", "/etc/g.toml")


def test_names_in_short_fit_into_an_argument() -> None:
    assert host_list(["n2", "n1", "r1n1", "r1n2", "r2n1", "login"]) == "login,n[1-2],r1n[1-2],r2n1"
    assert len(host_list([f"gpu{number:05d}-ib" for number in range(16384)])) < 100_000


def test_scontrol_that_fails_and_ends_well_is_no_empty_answer(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'slurm_load_topo error: Unable to contact slurm controller' >&2\n")
    program.chmod(0o755)
    with pytest.raises(ServiceError, match="Unable to contact"):
        Commands({"PATH": str(tmp_path)}).run("scontrol", "show", "topology")
    program.write_text('#!/bin/sh\necho "SwitchName=s0 Level=0 ${SLURM_TOPO_LEN:-whole}"\n')
    said = Commands({"PATH": f"{tmp_path}:/bin", "SLURM_TOPO_LEN": "10"}).run("scontrol", "show", "topology")
    assert said.endswith("whole\n")  # scontrol cuts off its lines otherwise
