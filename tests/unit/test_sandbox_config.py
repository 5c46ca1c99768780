from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_resil.core.errors import ConfigError
from slurm_resil.sandbox import SandboxSpec, conf, daemons
from slurm_resil.sandbox.procs import Proc, tail, wait_until
from slurm_resil.sandbox.spec import Layout
from slurm_resil.sandbox.sweep import of_node, of_sandbox

LAYOUT = Layout(dir=Path("/tmp/sb"))
PLAIN = conf.Endpoints(
    host="box", address="127.0.0.1", node_ports=(21, 22, 23, 24), user="me", private=False, loopback_only=True
)


def keys(text: str) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith(("Node", "Part", "#"))
    )


def render(*, version=(22, 5), at=None, extra="", **spec) -> str:
    return conf.slurm_conf(SandboxSpec(dir=LAYOUT.dir, **spec), LAYOUT, at or conf.Endpoints(), version, extra)


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.5", (24, 11)), ("slurm-wlm 26.05.0-1", (26, 5))],
)
def test_version(text, version):
    assert conf.parse_version(text) == version


def test_no_version():
    with pytest.raises(ValueError, match="no Slurm version"):
        conf.parse_version("slurmctld: not found")


@pytest.mark.parametrize(
    ("version", "key"),
    [((22, 5), "SlurmctldParameters"), ((23, 2), "PreemptParameters"), ((24, 11), "PreemptParameters")],
)
def test_the_preemption_signal_is_spelled_by_version(version, key):
    other = {"SlurmctldParameters", "PreemptParameters"} - {key}
    found = keys(render(version=version))
    assert found[key] in ("preempt_send_user_signal", "send_user_signal")
    assert not other & found.keys()
    assert key not in keys(render(version=version, preempt_signal=False))


def test_control_groups_are_disabled_where_slurm_can():
    assert conf.cgroup_conf((24, 11)) == "CgroupPlugin=disabled\n"
    assert "disabled" not in conf.cgroup_conf((22, 5))


def test_nodes_with_addresses_of_their_own():
    lines = [line for line in render(nodes=2, cpus=8).splitlines() if line.startswith("NodeName")]
    assert lines == [
        f"NodeName=node{k} NodeHostname=node{k} NodeAddr=10.87.0.{10 + k} CPUs=8 RealMemory=1024 State=UNKNOWN"
        for k in (1, 2)
    ]
    assert "CommunicationParameters" not in keys(render())


def test_nodes_on_one_address_listen_on_loopback():
    text = render(at=PLAIN, nodes=2)
    assert "NodeName=node2 NodeHostname=box NodeAddr=127.0.0.1 Port=22 " in text
    assert keys(text)["CommunicationParameters"] == "NoCtldInAddrAny,NoInAddrAny"
    assert keys(text)["SlurmUser"] == "me"


def test_partitions():
    lines = [line for line in render(grace_time_s=33).splitlines() if line.startswith("PartitionName")]
    assert "PartitionName=train " in lines[0]
    assert "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=33" in lines[0]
    assert "PriorityTier=10 PreemptMode=OFF" in lines[1]


def test_a_topology_has_its_plugin():
    assert "TopologyPlugin" not in render()
    for text, plugin in (("SwitchName=s0 Nodes=node1\n", "tree"), ("BlockName=b0 Nodes=node1\n", "block")):
        made = conf.slurm_conf(SandboxSpec(dir=LAYOUT.dir), LAYOUT, conf.Endpoints(), (22, 5), "", text)
        assert f"TopologyPlugin=topology/{plugin}\n" in made


def test_extra_lines_come_last_and_replace_ours():
    extra = "killwait = 3\n# SlurmdTimeout=1\nPartitionName=train Nodes=node1\nAuthInfo=cred_expire=5\n"
    text = render(extra=extra)
    assert text.endswith(extra)
    assert "KillWait=8" not in text
    assert "SlurmdTimeout=12" in text
    assert text.count("PartitionName=train ") == 1
    assert text.count("PartitionName=urgent ") == 1
    assert conf.extra_of(text) == extra
    number = text.splitlines().index("PartitionName=train Nodes=node1") + 1
    assert conf.extra_line(text, number) == 3
    assert conf.extra_line(text, 3) is None
    assert conf.extra_line(render(), 3) is None


def test_lines_that_an_error_speaks_of():
    extra = "KillWait=9\n\nNoSuchKey=1 # KillWait\n"
    assert conf.suspects(extra, "fatal: unrecognized key: NoSuchKey") == ["line 3: NoSuchKey=1"]
    assert conf.suspects(extra, "fatal: KillWait is bad") == ["line 1: KillWait=9"]
    assert conf.suspects("", "fatal") == []


def test_accounting_and_hooks_only_on_request():
    assert not {"AccountingStorageType", "Prolog", "Epilog"} & keys(render()).keys()
    assert keys(render(accounting=True))["AccountingStorageType"] == "accounting_storage/slurmdbd"
    assert keys(render(prolog=Path("/a/b")))["Prolog"] == "/a/b"
    assert "StoragePass=secret\n" in conf.slurmdbd_conf(LAYOUT, conf.Endpoints(), "secret")


def test_slurmdbd_finds_its_database_made():
    sql = conf.database_sql("secret").splitlines()
    assert "StorageLoc=slurm_acct\n" in conf.slurmdbd_conf(LAYOUT, conf.Endpoints(), "secret")
    assert sql[0] == "CREATE DATABASE slurm_acct;"
    assert sql[1].endswith("IDENTIFIED BY 'secret';")


def test_only_accounting_needs_a_database(tmp_path, monkeypatch):
    monkeypatch.setattr(daemons, "_SEARCH", str(tmp_path))
    for name in ("slurmctld", "slurmd", "scontrol", "munged"):
        (tmp_path / name).touch(mode=0o755)
    assert daemons.find_tools(accounting=False, namespaces=False).keys() == {
        "slurmctld",
        "slurmd",
        "scontrol",
        "munged",
    }
    with pytest.raises(ConfigError) as caught:
        daemons.find_tools(accounting=True, namespaces=False)
    assert "mariadb-server slurmdbd`, or a sandbox without accounting" in caught.value.mend
    (tmp_path / "munged").unlink()
    with pytest.raises(ConfigError) as caught:
        daemons.find_tools(accounting=True, namespaces=False)
    assert "without accounting" not in caught.value.mend


def test_private_accounts_replace_those_of_the_same_name():
    system = "root:x:0:0:root:/root:/bin/bash\nalice:x:1000:1000::/home/alice:/bin/sh\n"
    lines = conf.passwd(system, LAYOUT).splitlines()
    assert lines[0].startswith("root:")
    assert [line for line in lines if line.startswith("alice:")] == [
        "alice:x:20001:20001::/tmp/sb/home/alice:/bin/bash"
    ]
    assert conf.group("root:x:0:\n").splitlines() == ["root:x:0:", "alice:x:20001:", "bob:x:20002:"]


def test_hosts_and_plugins():
    assert "10.87.0.12 node2\n" in conf.hosts(SandboxSpec(dir=LAYOUT.dir, nodes=2))
    assert conf.plugstack_conf(("/a/p.so x=1",)) == "optional /a/p.so x=1\n"


def test_all_faults_of_a_spec_at_once(tmp_path):
    spec = SandboxSpec(
        dir=Path("/tmp/has space"), nodes=0, cpus=0, spares=3, bb_bytes=1, prolog=tmp_path, spank=("/no/plugin.so",)
    )
    with pytest.raises(ConfigError) as caught:
        spec.validated()
    assert len(caught.value.faults) == 7
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("relative", "absolute"),
        ("/tmp/../etc", "absolute"),
        ("/tmp/a#b", "letters"),
        ("/run/sb", "file system of its own"),
        ("/tmp/" + "x" * 80, "too long"),
    ],
)
def test_directories_that_cannot_work(path, said):
    with pytest.raises(ConfigError, match=said):
        SandboxSpec(dir=Path(path)).validated()


def test_a_directory_below_a_private_one(tmp_path):
    private = tmp_path / "p"
    private.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="lacks execute permission"):
        SandboxSpec(dir=private / "s").validated()


def test_a_process_is_named_by_its_start_too(tmp_path):
    me = Proc.of(os.getpid())
    assert me is not None
    assert me.alive
    other = Proc(pid=me.pid, start=me.start + 1)
    assert not other.alive
    other.kill()  # must not end this test
    me.save(tmp_path / "p.json")
    assert Proc.load(tmp_path / "p.json") == me
    (tmp_path / "p.json").write_text('{"pid": 1')
    assert Proc.load(tmp_path / "p.json") is None
    assert Proc.load(tmp_path / "none.json") is None


def test_processes_are_told_by_environment():
    everything = of_sandbox(LAYOUT)
    assert everything(frozenset({b"SLURM_RESIL_SANDBOX_OF=/tmp/sb"}))
    assert not everything(frozenset({b"SLURM_RESIL_SANDBOX_OF=/tmp/sb2"}))
    assert not everything(frozenset({b"SLURM_CONF=/tmp/sb/etc/slurm.conf"}))
    assert everything(frozenset({b"SLURM_CONF=/tmp/sb/etc/slurm.conf", b"SLURM_JOB_ID=7"}))
    one = of_node(LAYOUT, "node1")
    assert one(frozenset({b"SLURM_RESIL_SANDBOX_OF=/tmp/sb", b"SLURM_RESIL_SANDBOX_NODE=node1"}))
    assert not one(frozenset({b"SLURM_RESIL_SANDBOX_OF=/tmp/sb", b"SLURM_RESIL_SANDBOX_NODE=node10"}))
    assert one(frozenset({b"SLURM_CONF=/tmp/sb/etc/slurm.conf", b"SLURMD_NODENAME=node1"}))


def test_the_telling_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("start\nerror: mpi/pmix: no library\nerror: bad\nfatal: worse\nend\n")
    assert tail(log, only_errors=True) == "error: bad\nfatal: worse"
    assert tail(log, lines=1) == "end"
    assert tail(tmp_path / "none") == ""


def test_waiting_ends():
    answers = iter(("", "yes"))
    assert wait_until("an answer", lambda: next(answers), timeout_s=5, poll_s=0.001) == "yes"
