"""The epilog hands sealed shards over to a process of the job's user, which makes them durable after the epilog."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "drain"))

from shardworld import ITERATION, RUN, World, build  # noqa: E402 - found by the line above

from slurm_resil.core import fsio, paths  # noqa: E402
from slurm_resil.core.errors import EXIT_TRY_AGAIN  # noqa: E402

UID = 20001
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the hooks run as root")


class Nodes:
    """Two nodes: each has a burst buffer of its own, in which the job's directory is its user's."""

    def __init__(self, root: Path, world: World) -> None:
        self.root, self.world = root, world
        self.pids: list[int] = []

    def bb(self, node: int) -> Path:
        return self.root / f"bb{node}"

    def job(self, node: int) -> Path:
        return self.bb(node) / "job-9"

    def epilog(self, node: int, **config: object) -> list[dict[str, object]]:
        """Run it; returns what it noted."""
        log = self.root / f"hooks{node}.log"
        path = self.root / f"hooks{node}.json"
        path.write_text(json.dumps({"bb_root": str(self.bb(node)), "log": str(log), "late": True, **config}))
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from slurm_resil.hooks import base, epilog; "
        code += f"sys.exit(base.main(epilog.epilog, ['--config', {str(path)!r}]))"
        env = {"SLURM_JOB_ID": "9", "SLURM_JOB_UID": str(UID), "SLURM_JOB_GID": str(UID)}
        env |= {"SLURMD_NODENAME": f"node{node}", "LD_PRELOAD": "", "SLURM_SECRET": "x"}
        before = log.read_text().count("\n") if log.exists() else 0
        done = subprocess.run([sys.executable, "-I", "-c", code], env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        notes = [json.loads(line) for line in log.read_text().splitlines()[before:]] if log.exists() else []
        self.pids += [note["pid"] for note in notes if "pid" in note]
        return notes

    def said(self, node: int) -> str:
        path = self.job(node) / "late.log"
        return path.read_text() if path.exists() else "nothing"


def own(top: Path) -> None:
    for where, _, names in os.walk(top):
        for name in (".", *names):
            os.chown(os.path.join(where, name), UID, UID, follow_symlinks=False)


def wait(what: str, ready: Callable[[], object], said: Callable[[], str], limit_s: float = 40.0) -> None:
    limit = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < limit, f"{what}: {said()}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that another user can reach; pytest closes its own whenever another one begins."""
    made = Path(tempfile.mkdtemp(prefix="srl-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def nodes(root: Path) -> Iterator[Nodes]:
    world = build(root, ranks=4, per_node=2, scale=20)
    made = Nodes(root, world)
    world.job_dirs = [str(made.job(node)) for node in range(2)]
    for node in range(2):
        made.bb(node).mkdir(mode=0o755)
        made.job(node).mkdir(mode=0o700)
    world.seal()
    for node in range(2):
        about = {"run_id": RUN, "job_id": 9, "attempt": 0, "run_dir": world.run_dir, "node": f"node{node}"}
        fsio.write_json(paths.run_info(world.job_dirs[node]), about)
        own(made.job(node))
    record = Path(paths.attempt(world.run_dir, 0))
    record.parent.mkdir()
    record.write_text(json.dumps({"job_id": 9, "nodes": ["node0", "node1"]}))
    own(root / "pfs")
    yield made
    for pid in made.pids:
        if alive(pid):
            os.kill(pid, 9)


def test_both_nodes_make_it_durable_and_leave_nothing(nodes: Nodes) -> None:
    notes = [nodes.epilog(node) for node in range(2)]
    assert [[note["event"] for note in one] for one in notes] == [["handed_over"], ["handed_over"]]
    for node in range(2):
        wait("gone", lambda node=node: not os.listdir(nodes.job(node)), lambda node=node: nodes.said(node))
    manifest = nodes.world.check()
    assert os.stat(os.path.join(nodes.world.run_dir, manifest.file)).st_uid == UID
    for node in range(2):
        assert nodes.epilog(node) == []  # another epilog of that job finds nothing to keep
        assert not nodes.job(node).exists()


def test_the_process_is_the_users_alone_and_gives_way(nodes: Nodes) -> None:
    (note,) = nodes.epilog(0)
    pid = int(note["pid"])
    proc = Path(f"/proc/{pid}")
    wait("waiting for the other node", lambda: "heads-node0.json" in _names(nodes), lambda: nodes.said(0))
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
    assert status["Uid"].split() == [str(UID)] * 4
    assert status["Gid"].split() == [str(UID)] * 4
    assert status["Groups"].split() in ([], [str(UID)])
    assert int(status["CapEff"], 16) == 0
    assert (proc / "oom_score_adj").read_text() == "1000\n"
    environ = (proc / "environ").read_text()
    assert "SLURM_SECRET" not in environ
    assert "LD_PRELOAD" not in environ
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()  # its parent is gone
    assert int(fields[3]) not in (0, os.getsid(0))  # a session of its own
    assert int(fields[16]) == 19  # nice
    limits = {line[:25].strip(): line[25:].split()[:2] for line in (proc / "limits").read_text().splitlines()}
    assert limits["Max data size"] == [str(4 << 30)] * 2
    assert limits["Max core file size"] == ["0", "0"]
    opened = {os.path.realpath(path) for path in (proc / "fd").iterdir()}
    assert not any("hooks" in path or path == str(nodes.bb(0)) for path in opened), opened
    nodes.epilog(1)
    wait("durable", lambda: not os.listdir(nodes.job(0)), lambda: nodes.said(0))
    nodes.world.check()


def _names(nodes: Nodes) -> list[str]:
    path = paths.late(nodes.world.run_dir, 9, 0)
    return os.listdir(path) if os.path.isdir(path) else []


def test_one_that_is_killed_is_started_again_by_the_next_epilog(nodes: Nodes) -> None:
    (note,) = nodes.epilog(0)
    wait("heads", lambda: "heads-node0.json" in _names(nodes), lambda: nodes.said(0))
    os.kill(int(note["pid"]), 9)
    nodes.epilog(0)
    nodes.epilog(1)
    wait("durable", lambda: not os.listdir(nodes.job(0)), lambda: nodes.said(0))
    nodes.world.check()


def test_its_time_is_limited_and_the_shards_stay(nodes: Nodes) -> None:
    (note,) = nodes.epilog(0, late_limit="2")
    wait("the end", lambda: not alive(int(note["pid"])), lambda: nodes.said(0))
    last = json.loads(nodes.said(0).splitlines()[-2])
    assert (last["event"], last["exit_code"]) == ("failed", EXIT_TRY_AGAIN)
    assert "not done in 2 s" in last["error"]
    assert (nodes.job(0) / "manifests").exists()
    events = [json.loads(line) for line in Path(nodes.world.run_dir, "events.jsonl").read_text().splitlines()]
    assert [(one["event"], one["node"]) for one in events] == [("late_failed", "node0")]


def test_a_run_that_goes_on_is_left_alone(nodes: Nodes) -> None:
    (note,) = nodes.epilog(0)
    wait("heads", lambda: "heads-node0.json" in _names(nodes), lambda: nodes.said(0))
    path = Path(paths.run_info(str(nodes.job(0))))
    fsio.write_json(path, json.loads(path.read_text()) | {"attempt": 1})
    os.chown(path, UID, UID)
    wait("the end", lambda: not alive(int(note["pid"])), lambda: nodes.said(0))
    assert "another attempt is at work" in nodes.said(0)
    assert (nodes.job(0) / "manifests").exists()


def test_links_lead_nowhere(nodes: Nodes) -> None:
    secret = nodes.root / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    log = nodes.job(0) / "late.log"
    log.symlink_to(secret)
    lock = nodes.job(1) / "late.lock"
    lock.symlink_to(secret)
    slot = nodes.job(1) / "slots" / "2-0.h5"
    slot.unlink()
    slot.symlink_to(secret)
    own(nodes.job(0))
    own(nodes.job(1))
    before = nodes.epilog(0)
    (note,) = nodes.epilog(1)
    wait("the end", lambda: not alive(int(note["pid"])), lambda: nodes.said(1))
    assert "late.lock" in nodes.said(1)
    lock.unlink()
    (note,) = nodes.epilog(1)
    for one in (note, *before):
        wait("the end", lambda one=one: not alive(int(one["pid"])), lambda: nodes.said(1))
    assert "Too many levels of symbolic links" in nodes.said(1)
    assert secret.read_text() == "root's"
    assert nodes.world.published() == []
    assert "not sealed by rank 2" in fsio.read_json(paths.dropped(nodes.world.run_dir, ITERATION))["why"]


def test_without_it_everything_is_as_before(nodes: Nodes) -> None:
    assert [note["event"] for note in nodes.epilog(0, late=False)] == ["kept"]
    assert nodes.pids == []
