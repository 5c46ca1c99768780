from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from slurm_resil.core.errors import ConfigError, NotPermittedError, TryAgainError, UsageError
from slurm_resil.sandbox import Sandbox, SandboxSpec, api
from slurm_resil.sandbox.daemons import find_tools
from slurm_resil.sandbox.procs import Proc, wait_gone, wait_until
from slurm_resil.sandbox.teardown import tear_down

pytestmark = pytest.mark.cluster

TEMP = Path(tempfile.gettempdir())
MPI_PYTHON = sys.executable
MPI_PROGRAM = """
import socket
from mpi4py import MPI
world = MPI.COMM_WORLD
print(world.rank, world.size, world.allreduce(world.rank + 1), socket.gethostname(), flush=True)
"""


def short_dir() -> Path:
    path = tempfile.mkdtemp(prefix="srs-")
    os.rmdir(path)
    return Path(path)


def cli(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slurm_resil", "sandbox", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, **kwargs)


def words(*argv: str) -> set[str]:
    def answer() -> list[str]:  # lsns fails where a process ends while it looks
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.stdout.split("\n") if done.returncode == 0 else []

    return set(wait_until(f"an answer of {argv[0]}", answer, timeout_s=10))


def footprint() -> dict[str, set[str]]:
    """What a sandbox could leave on this host."""
    processes = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and Proc.of(int(name)) is not None:
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
                argv = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if b"SLURM_RESIL_SANDBOX_OF=" in environment or f"{TEMP}/srs-".encode() in argv:
                processes.add(f"{name} {argv!r}")
    return {
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "links": {line.split(":")[1] for line in words("ip", "-o", "link") if line},
        "namespaces": {line for line in words("lsns", "-n", "-o", "NS,TYPE") if line},
        "processes": processes,
        "files": {*(str(path) for path in TEMP.glob("srs-*")), *(str(path) for path in Path("/run").glob("*"))},
        "sockets": {line for line in Path("/proc/net/unix").read_text().splitlines() if f"{TEMP}/srs-" in line},
    }


def left_since(before: dict[str, set[str]]) -> dict[str, set[str]]:
    return {key: now - before[key] for key, now in footprint().items() if now - before[key]}


def test_srun_prints_the_hostnames_of_its_nodes(cluster):
    done = cluster.run(["srun", "-N3", "sh", "-c", "echo $(hostname) $(id -un) $PWD"], user="alice")
    home = cluster.layout.home / "alice"
    assert sorted(done.stdout.splitlines()) == [f"node{k} alice {home}" for k in (1, 2, 3)]


def test_pmi2_over_two_nodes(cluster):
    pytest.importorskip("mpi4py")
    argv = ["srun", "-N2", "-n4", "--mpi=pmi2", MPI_PYTHON, "-c", MPI_PROGRAM]
    done = cluster.run(argv, user="alice", timeout_s=90)
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:3] for line in lines] == [[str(rank), "4", "10"] for rank in range(4)]
    assert {line[3] for line in lines} == {"node1", "node2"}


def test_overlapping_steps_in_a_full_allocation(cluster):
    script = "srun -N2 --ntasks-per-node=4 sleep 3 & srun --overlap -N2 --ntasks-per-node=1 hostname; wait"
    done = cluster.run(["salloc", "-N2", "--exclusive", "sh", "-c", script], user="alice")
    assert sorted(done.stdout.split()) == ["node1", "node2"]


def test_burst_buffer_and_shm_are_private_and_pfs_is_shared(cluster):
    for node in ("node1", "node2"):
        script = f"echo {node} > {cluster.bb}/who; echo {node} > /dev/shm/who; echo {node} > {cluster.pfs}/{node}"
        cluster.run(["sh", "-c", script], node=node)
    for node in ("node1", "node2"):
        assert cluster.node_path(node, cluster.bb / "who").read_text() == f"{node}\n"
        assert cluster.node_path(node, "/dev/shm/who").read_text() == f"{node}\n"
        assert (cluster.pfs / node).read_text() == f"{node}\n"
    assert not (cluster.bb / "who").exists()
    cluster.node_wipe("node1")
    assert not os.listdir(cluster.node_path("node1", cluster.bb))
    assert not os.listdir(cluster.node_path("node1", "/dev/shm"))
    assert cluster.node_path("node2", cluster.bb / "who").exists()
    kinds = cluster.run(["stat", "-f", "-c", "%T", str(cluster.bb)], node="node1").stdout
    assert kinds == "tmpfs\n"


def test_exec_passes_exit_code_input_environment_and_groups(cluster):
    assert cluster.run(["sh", "-c", "exit 7"], check=False).returncode == 7
    assert cluster.run(["sh", "-c", "kill -TERM $$"], check=False).returncode == 143
    assert cluster.run(["cat"], stdin="text\n", user="bob").stdout == "text\n"
    done = cluster.run(["sh", "-c", "id -Gn; echo $X $HOME"], user="bob", env={"X": "1"})
    assert done.stdout == f"bob\n1 {cluster.layout.home / 'bob'}\n"
    assert "cannot run" in cluster.run(["/no/such/program"], check=False).stderr
    with pytest.raises(UsageError, match="no user 'eve'"):
        cluster.run(["true"], user="eve")
    with pytest.raises(UsageError, match="no node 'node9'"):
        cluster.run(["true"], node="node9")


def test_exec_leaves_nothing_when_it_is_killed(cluster):
    marker = "54321"
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["sleep", marker], timeout_s=1.0)
    argv = f"sleep\0{marker}\0".encode()

    def gone() -> bool:
        return not any(
            path.read_bytes() == argv for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)
        )

    wait_until("the end of the command", gone, timeout_s=10)


def test_spares_run_nothing_until_a_guard_reservation_lets_a_job_in(cluster):
    assert cluster.node_states()["node4"] == "reserved"
    refused = cluster.run(["srun", "--immediate=3", "-w", "node4", "hostname"], user="alice", check=False, timeout_s=30)
    assert refused.returncode != 0
    cluster.run(
        [
            "scontrol",
            "create",
            "reservation",
            "ReservationName=guard",
            "Nodes=node3,node4",
            "Users=alice",
            "StartTime=now",
            "Duration=15",
            "Flags=IGNORE_JOBS,FLEX,OVERLAP",
        ]
    )
    try:
        done = cluster.run(
            ["srun", "--reservation=guard", "-N2", "-w", "node3,node4", "hostname"], user="alice", timeout_s=30
        )
        assert sorted(done.stdout.split()) == ["node3", "node4"]
    finally:
        cluster.run(["scontrol", "delete", "reservation", "guard"])


def test_urgent_jobs_preempt_train_jobs_after_the_grace_time(cluster):
    out = cluster.layout.home / "alice" / "preempt.out"
    script = "#!/bin/sh\necho start $SLURM_RESTART_COUNT\nsrun -N3 sh -c \"trap '' TERM; echo on; sleep 600\"\n"
    submit = ["sbatch", "--parsable", "-N3", "--exclusive", "-o", str(out)]
    job = cluster.run(submit, user="alice", stdin=script).stdout.strip()

    def state() -> str:
        return cluster.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.strip()

    wait_until("the job's tasks", lambda: out.exists() and out.read_text().count("on\n") == 3, timeout_s=20)
    began = time.monotonic()
    urgent = ["srun", "-p", "urgent", "-N3", "--exclusive", "hostname"]
    done = cluster.run(urgent, user="bob", timeout_s=90)
    took_s = time.monotonic() - began
    assert len(done.stdout.split()) == 3
    assert cluster.spec.grace_time_s <= took_s < cluster.spec.grace_time_s + 30
    assert state() == "PENDING"
    cluster.run(["scancel", job], user="alice")
    wait_until("idle nodes", lambda: cluster.node_states()["node1"] == "idle", timeout_s=40, poll_s=0.2)


def test_a_killed_node_dies_with_all_its_processes_keeps_its_burst_buffer_and_comes_back(cluster):
    cluster.run(["sh", "-c", f"echo kept > {cluster.bb}/kept; setsid sleep 4242 >/dev/null 2>&1 &"], node="node1")
    cluster.node_kill("node1")
    cluster.node_kill("node1")
    assert not any(
        path.read_bytes() == b"sleep\x004242\x00" for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
    )
    with pytest.raises(TryAgainError, match="node1 is dead"):
        cluster.run(["true"], node="node1")
    cluster.wait_node("node1", "down", timeout_s=60)
    cluster.node_restore("node1", timeout_s=60)
    assert cluster.node_states()["node1"] == "idle"
    assert cluster.node_path("node1", cluster.bb / "kept").read_text() == "kept\n"
    done = cluster.run(["srun", "-w", "node1", "hostname"], user="alice")
    assert done.stdout == "node1\n"


def test_a_restored_node_is_the_new_one_also_when_slurm_missed_the_fault(cluster):
    cluster.node_kill("node2")
    cluster.node_restore("node2")
    assert cluster.run(["srun", "-w", "node2", "hostname"], user="alice").stdout == "node2\n"


def test_a_cut_node_is_down_and_heals(cluster):
    cluster.node_cut("node2")
    assert cluster.status()["nodes"][1]["link"] == "down"
    assert cluster.status()["nodes"][1]["alive"]
    cluster.wait_node("node2", "down", timeout_s=60)
    cluster.node_heal("node2")
    cluster.wait_node("node2", "idle", timeout_s=60)


def test_restore_resumes_a_drained_node(cluster):
    cluster.run(["scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=test"])
    cluster.wait_node("node3", "drained", timeout_s=20)
    cluster.node_restore("node3", resume=True)
    assert cluster.node_states()["node3"] == "idle"


def test_slurmctld_restarts_with_its_state(cluster):
    cluster.kill_slurmctld()
    assert cluster.node_states() == {}
    cluster.restart_slurmctld()
    assert "spares" in cluster.run(["scontrol", "-o", "show", "reservation"]).stdout
    cluster.wait_node("node1", "idle", timeout_s=60)


def test_status_and_exec_of_the_command_line(cluster):
    place = ["--dir", str(cluster.layout.dir)]
    status = json.loads(cli("status", *place, "--json").stdout)
    assert [node["name"] for node in status["nodes"]] == list(cluster.nodes)
    assert status["nodes"][3]["spare"]
    assert Path(f"/proc/{status['keeper_pid']}").exists()
    done = cli("exec", *place, "--user", "bob", "--node", "node2", "--", "sh", "-c", "hostname; id -un; exit 3")
    assert (done.stdout, done.returncode) == ("node2\nbob\n", 3)
    root = [*place, "--user", "root"]
    assert cli("exec", *root, "python", "-c", "import sys; print(sys.prefix)").stdout.strip() == sys.prefix
    if Path(sys.executable).with_name("slurm-resil").exists():
        assert "Usage: slurm-resil" in cli("exec", *root, "slurm-resil", "--help").stdout  # the command's, not exec's
    for command, code, word in [
        ("nosuch", 127, "/usr/bin"),
        ("/nope/x", 127, "/nope/x"),
        ("/etc/passwd", 126, "denied"),
    ]:
        done = cli("exec", *place, command)
        assert done.returncode == code and word in done.stderr and command in done.stderr and "b'" not in done.stderr
    assert "slurmctld" in cli("logs", *place, "slurmctld").stdout
    again = cli("up", *place)
    assert again.returncode == 75
    assert "already" in again.stderr
    assert cluster.node_states()


@pytest.mark.alone
def test_eight_nodes_start_in_time_and_down_leaves_nothing(cluster_factory):
    before = footprint()
    began = time.monotonic()
    sandbox = cluster_factory(nodes=8, spares=2, dir=short_dir())
    assert time.monotonic() - began < 15
    states = sandbox.node_states()
    assert [states[name] for name in sandbox.nodes] == ["idle"] * 6 + ["reserved"] * 2
    sandbox.run(["sbatch", "-N6", "--wrap", "srun -N6 sh -c 'setsid sleep 3000 & sleep 3000'"], user="alice")
    wait_until("a running job", lambda: "mixed" in str(sandbox.node_states()), timeout_s=20, poll_s=0.2)
    assert left_since(before)["processes"]
    sandbox.down()
    assert not sandbox.layout.dir.exists()
    wait_until("the end of the namespaces", lambda: not left_since(before), timeout_s=10)
    assert not tear_down(sandbox.layout.dir)


def test_two_run_side_by_side(cluster, cluster_factory):
    other = cluster_factory(nodes=2, dir=short_dir())
    assert other.run(["srun", "-N2", "hostname"], user="alice").stdout.split()
    other.node_kill("node1")
    other.down()
    assert cluster.node_alive("node1")
    assert cluster.run(["srun", "-N2", "hostname"], user="alice").stdout.split()


@pytest.mark.alone
@pytest.mark.parametrize("torn", [False, True])
def test_down_after_the_keeper_was_killed_or_its_record_torn(cluster_factory, torn):
    before = footprint()
    sandbox = cluster_factory(nodes=2, dir=short_dir())
    if torn:
        sandbox.layout.keeper.write_text('{"pid": ')
        sandbox.layout.info.write_text("{")
        with pytest.raises(TryAgainError, match="half started"):
            Sandbox.attach(sandbox.layout.dir)
    else:
        keeper = Proc.load(sandbox.layout.keeper)
        os.kill(keeper.pid, signal.SIGKILL)
        wait_gone([keeper])
        with pytest.raises(TryAgainError, match="crashed"):
            Sandbox.attach(sandbox.layout.dir)
    assert cli("down", "--dir", str(sandbox.layout.dir)).returncode == 0
    wait_until("the end of everything", lambda: not left_since(before), timeout_s=10)


def test_down_never_kills_a_process_that_got_the_keepers_pid(cluster_factory):
    sandbox = cluster_factory(nodes=1, dir=short_dir())
    keeper = Proc.load(sandbox.layout.keeper)
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            Proc(pid=bystander.pid, start=keeper.start).save(sandbox.layout.keeper)
            sandbox.down()
            assert bystander.poll() is None
            assert not keeper.alive
        finally:
            bystander.kill()


@pytest.mark.alone
def test_up_that_is_killed_leaves_only_a_directory_that_down_removes():
    before = footprint()
    path = short_dir()
    argv = [sys.executable, "-m", "slurm_resil", "sandbox", "up", "--dir", str(path), "--nodes", "4"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        wait_until("the keeper", lambda: (path / "procs" / "node1.json").exists(), timeout_s=20)
        process.kill()
    assert cli("down", "--dir", str(path)).returncode == 0
    wait_until("the end of everything", lambda: not left_since(before), timeout_s=10)


def test_up_where_there_can_be_no_directory_is_one_clear_error():
    for path in (short_dir() / "sb", Path("/etc/hostname/sb")):
        done = cli("up", "--dir", str(path))
        assert done.returncode == 2
        assert f"cannot make {path}" in done.stderr
        assert "Traceback" not in done.stderr


def test_down_spares_what_is_not_a_sandbox(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not a sandbox"):
        tear_down(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    path = short_dir()
    path.mkdir()
    (path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        Sandbox.up(SandboxSpec(dir=path, nodes=1))
    assert [file.name for file in path.iterdir()] == ["file"]
    (path / "file").unlink()
    assert not tear_down(path)
    assert not path.exists()


@pytest.mark.alone
@pytest.mark.parametrize(
    "line", ["NoSuchKey=1", "no key at all", "KillWait=abc", "PartitionName=x Nodes=node99", "SelectType=select/none"]
)
def test_a_bad_line_for_slurm_conf_is_quoted_and_nothing_is_left(tmp_path, line):
    before = footprint()
    extra = tmp_path / "site.conf"
    extra.write_text(f"SlurmdTimeout=9\n{line}\n")
    path = short_dir()
    with pytest.raises(ConfigError) as caught:
        Sandbox.up(SandboxSpec(dir=path, nodes=2, slurm_conf_extra=extra))
    assert f"{extra} line 2" in str(caught.value)
    assert line in str(caught.value)
    assert not path.exists()
    wait_until("the end of everything", lambda: not left_since(before), timeout_s=10)


def test_lines_for_slurm_conf_come_last(cluster_factory, tmp_path):
    extra = tmp_path / "site.conf"
    extra.write_text("KillWait=9\nPartitionName=debug Nodes=ALL MaxTime=10\n")
    sandbox = cluster_factory(nodes=1, slurm_conf_extra=extra, dir=short_dir())
    shown = sandbox.run(["scontrol", "show", "config"]).stdout
    assert "KillWait                = 9 sec" in shown
    assert sandbox.run(["srun", "-p", "debug", "hostname"], user="alice").stdout == "node1\n"
    sandbox.down()


def test_prolog_and_epilog_run_as_root_on_the_node(cluster_factory, tmp_path):
    for name in ("prolog", "epilog"):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\necho $(hostname) $(id -un) $SLURM_JOB_ID > /dev/shm/{name}\n")
        file.chmod(0o755)
    sandbox = cluster_factory(nodes=2, prolog=tmp_path / "prolog", epilog=tmp_path / "epilog", dir=short_dir())
    sandbox.run(["srun", "-N2", "true"], user="alice")
    for node in sandbox.nodes:
        for name in ("prolog", "epilog"):
            file = sandbox.node_path(node, f"/dev/shm/{name}")
            wait_until(f"{name} on {node}", lambda file=file: file.exists() and file.read_text(), timeout_s=10)
            assert file.read_text() == f"{node} root 1\n"
    sandbox.down()


def test_accounting(cluster_factory):
    sandbox = cluster_factory(nodes=1, accounting=True, dir=short_dir())
    sandbox.run(["srun", "hostname"], user="alice")

    def accounted() -> bool:
        done = sandbox.run(["sacct", "-X", "-n", "-P", "-a", "-o", "user,account,state", "-S", "now-1hour"])
        return "alice|lab|COMPLETED" in done.stdout

    wait_until("the job in the accounting", accounted, timeout_s=30, poll_s=0.5)
    assert sandbox.run(["sacctmgr", "-n", "-P", "show", "cluster", "format=cluster"]).stdout == "sandbox\n"
    sandbox.down()


@pytest.mark.alone
@pytest.mark.parametrize("daemon", ["mariadbd", "slurmdbd"])
def test_accounting_that_cannot_start_is_one_error_with_what_its_log_says(tmp_path, monkeypatch, daemon):
    before = footprint()
    broken = tmp_path / daemon
    broken.write_text("#!/bin/sh\necho starting\necho 'fatal: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(api, "find_tools", lambda **wanted: {**find_tools(**wanted), daemon: str(broken)})
    path = short_dir()
    with pytest.raises(ConfigError) as caught:
        Sandbox.up(SandboxSpec(dir=path, nodes=1, accounting=True))
    assert str(caught.value) == f"{daemon} ended at its start\n{daemon}.out:\nfatal: out of order"
    assert not path.exists()
    wait_until("the end of everything", lambda: not left_since(before), timeout_s=10)


@pytest.mark.alone
def test_rootless_as_another_user():
    parent = Path(tempfile.mkdtemp(prefix="sro-"))  # where others can write, which run.sh's own directory is not
    parent.chmod(0o1777)
    before = footprint()
    path = parent / "srs-1"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/", "env": env}
    up = cli("up", "--dir", str(path), "--nodes", "3", "--spares", "1", **nobody)
    try:
        assert up.returncode == 0, up.stderr
        assert "lost: all nodes have this host's name" in up.stderr
        done = cli("exec", "--dir", str(path), "--", "srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME", **nobody)
        assert sorted(done.stdout.split()) == ["node1", "node2"], done.stderr
        script = "srun -N2 sh -c 'setsid sleep 3000 & sleep 3000'"
        assert cli("exec", "--dir", str(path), "--", "sbatch", "-N2", "--wrap", script, **nobody).returncode == 0
        assert cli("node", "cut", "node1", "--dir", str(path), **nobody).returncode == 2
        assert cli("node", "kill", "node1", "--dir", str(path), **nobody).returncode == 0
        assert cli("node", "restore", "node1", "--dir", str(path), **nobody).returncode == 0
        with pytest.raises(NotPermittedError):
            Sandbox.attach(path)
    finally:
        down = cli("down", "--dir", str(path), **nobody)
    assert down.returncode == 0, down.stderr
    assert not path.exists()
    wait_until("the end of everything", lambda: not left_since(before), timeout_s=10)
    parent.rmdir()
