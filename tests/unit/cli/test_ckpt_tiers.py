"""``ckpt ls``, ``verify`` and ``prune`` on what several nodes hold of each other; encodes and rebuilds are real."""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "drain"))
sys.path.insert(0, str(Path(__file__).parents[1] / "redundancy"))
sys.path.insert(0, str(Path(__file__).parent))

import setworld
from command import ckpt
from shardworld import World

from slurm_resil.cli import look, nodes, tiers
from slurm_resil.cli.ckpt import ckpt as group
from slurm_resil.core import paths
from slurm_resil.launch import records

NODES = 4


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Four nodes of two ranks; 40 is drained, 50 protected, 60 sealed by all but one node."""
    made = setworld.world(tmp_path, NODES * 2, per_node=2)
    made.drain()
    for rank, state in enumerate(made.states):
        made.seal_rank(rank, state, 50, 1)
    setworld.protect(made, "rs:2", iteration=50)
    for rank, state in enumerate(made.states[:-2]):
        made.seal_rank(rank, state, 60, 2)
    return made


def asked(world: World, *unseen: int, job: int | None = 9) -> nodes.Asked:
    """All nodes as they tell what they hold; through what is sent."""
    found = nodes.Asked(job_id=job, goes_on=job is not None, told=True)
    lines = []
    for node in range(NODES):
        if node in unseen:
            found.unseen[f"node{node}"] = "no answer"
        else:
            lines += look.look(world.job_dir(node), f"node{node}").lines()
    random.Random(5).shuffle(lines)
    found.views = look.told("\n".join(["Welcome!", *lines, "bye"]))
    return found


def states(world: World, *unseen: int, job: int | None = 9) -> dict[int, str]:
    return {
        entry.iteration: entry.state.value for entry in tiers.together(world.run_dir, asked(world, *unseen, job=job))
    }


def test_what_nodes_tell_arrives_whole_or_not_at_all(world, monkeypatch):
    monkeypatch.setattr(look, "_LINE_CHARS", 100)  # as of many ranks
    view = look.look(world.job_dir(1), "node1")
    look.read(view, (), deep=True)
    lines = list(view.lines())
    assert len(lines) > 1 and all(len(line) < 1000 for line in lines)
    assert look.told("\n".join(lines)) == {"node1": view}
    assert look.told("\n".join(lines[1:])) == {}
    changed = lines[0][:-1] + ("B" if lines[0][-1] == "A" else "A")
    assert look.told("\n".join([changed, *lines[1:]])) == {}


def test_states_over_all_nodes(world):
    assert states(world) == {60: "WRITING", 50: "PROTECTED", 40: "DURABLE"}
    entry = next(one for one in tiers.together(world.run_dir, asked(world)) if one.iteration == 50)
    assert entry.where() == "node[0-3] (+parity)" and entry.scheme == "rs" and not entry.rebuildable
    assert entry.ranks == list(range(8)) and entry.world_size == 8 and not entry.faults
    assert all(one["protects"] and one["parity_bytes"] > 0 for one in entry.row()["nodes"].values())


def test_nodes_that_are_not_seen_make_nothing_lost(world):
    assert states(world, 2) == {60: "LOCAL", 50: "LOCAL", 40: "DURABLE"}
    attempt = records.Attempt(world.run_dir, 0, job_id=9, restarts=0, nodes=[f"node{i}" for i in range(NODES)])
    attempt.update(levels={"local": 55, "protected": 50, "durable": 40})
    assert states(world, 2) == {60: "LOCAL", 55: "LOCAL", 50: "PROTECTED", 40: "DURABLE"}
    said = {one.iteration: one.said for one in tiers.together(world.run_dir, asked(world, 2))}
    assert said == {60: False, 55: True, 50: True, 40: False}
    # of a job that is over nobody knows
    assert 55 not in states(world, 2, job=None)


@pytest.mark.parametrize(("lost", "state"), [(1, "PROTECTED"), (2, "PROTECTED"), (3, "LOST")])
def test_lost_nodes_that_are_covered_and_more(world, lost, state):
    setworld.wipe(world, *range(lost))
    assert states(world)[50] == state
    if state == "LOST":
        os.truncate(paths.parity(world.job_dir(3), 50, 3), 5)  # nor is it on its way if what is left is damaged
        assert states(world)[50] == state
    entry = next(one for one in tiers.together(world.run_dir, asked(world)) if one.iteration == 50)
    assert entry.rebuildable == (state == "PROTECTED")
    if entry.rebuildable:
        setworld.restore(world)
        entry = next(one for one in tiers.together(world.run_dir, asked(world)) if one.iteration == 50)
        assert not entry.rebuildable and entry.ranks == list(range(8))
        assert entry.where() == "node[0-3] (+parity)"


def test_what_was_dropped_when_its_job_ended(world):
    body = {"iteration": 80, "job_id": 9, "attempt": 0, "node": "node2", "why": "node3 never came back", "kept": False}
    (Path(world.run_dir) / "ckpt-0000000080.dropped").write_text(json.dumps(body))
    (Path(world.run_dir) / "ckpt-0000000050.dropped").write_text(json.dumps({**body, "iteration": 50, "kept": True}))
    (Path(world.run_dir) / "ckpt-0000000090.dropped").write_text("{")
    assert states(world) == {90: "DROPPED", 80: "DROPPED", 60: "WRITING", 50: "PROTECTED", 40: "DURABLE"}
    text = ckpt("ls", "--run-dir", world.run_dir).stdout
    assert "node3 never came back, as node node2 of job 9" in text and "cannot be read" in text


def test_staged_copies_are_shown(world):
    for node in (0, 2):
        os.makedirs(paths.fetched(world.job_dir(node)))
        Path(paths.staged(world.job_dir(node), 40)).write_bytes(b"x" * 10000)
        Path(paths.staged_manifest(world.job_dir(node), 40)).write_text("{}")
    entry = next(one for one in tiers.together(world.run_dir, asked(world)) if one.iteration == 40)
    assert entry.where().endswith("staged on node[0,2]") and entry.held["node0"].staged_bytes >= 10000


def test_an_encode_that_not_all_have_published_protects_nothing(world):
    os.unlink(paths.member(world.job_dir(3), 50, 3))
    assert states(world)[50] == "LOCAL"


def test_a_drain_at_work_and_a_slot_that_was_written_again(world):
    Path(paths.drained_part(world.run_dir, 50)).touch()
    world.seal_rank(0, world.states[0], 70, 1)  # the slot of 50; its manifest should have gone first
    found = {one.iteration: one for one in tiers.together(world.run_dir, asked(world))}
    assert found[50].state == "DRAINING" and found[70].state == "WRITING"
    assert (
        len(found[50].faults) == 1
        and "of another iteration 70" in found[50].faults[0]
        and "node0" in found[50].faults[0]
    )


def verified(world, node, *arguments):
    argv = ("verify", *arguments, "--json", "--run-dir", world.run_dir, "--job-dir", world.job_dir(node))
    done = ckpt(*argv)
    return done.returncode, {one["iteration"]: one for one in json.loads(done.stdout)["checkpoints"]}


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_verify_reads_the_redundancy(world):
    code, found = verified(world, 1, "--deep")
    assert code == 0 and all(one["sound"] for one in found.values()), found
    parity = paths.parity(world.job_dir(1), 50, 1)
    flip(parity, os.path.getsize(parity) - 5)
    code, found = verified(world, 1, "50")
    assert code == 65 and len(found[50]["flaws"]) == 1 and f"{parity}: its bytes from" in found[50]["flaws"][0]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: os.truncate(path, 10), "is truncated: 10 bytes"),
        (os.unlink, "is missing"),
        (lambda path: (os.unlink(path), os.symlink("/etc/passwd", path)), "cannot read"),
        (lambda path: flip(path[:-3] + "json", 30), "hash"),
    ],
)
def test_any_damage_to_the_redundancy_is_named(world, harm, said):
    harm(paths.parity(world.job_dir(1), 50, 1))
    for arguments in (("50",), ("50", "--deep")):
        code, found = verified(world, 1, *arguments)
        assert code == 65 and any(said in flaw for flaw in found[50]["flaws"]), found
    done = ckpt("ls", "--json", "--run-dir", world.run_dir, "--job-dir", world.job_dir(1))
    row = next(one for one in json.loads(done.stdout)["checkpoints"] if one["iteration"] == 50)
    assert done.returncode == 0 and any(said in fault for fault in row["faults"])


def test_verify_deep_of_shards(world):
    """A shard that was consistently sealed anew is not what protects it; and HDF5 has its own view of a slot."""
    item = next(one for one in world.manifest(2, 50).items if one.name == "model/rows")
    world.states[2]["model/rows"].data = np.ones_like(world.states[2]["model/rows"].data)
    world.seal_rank(2, world.states[2], 50, 1)
    assert verified(world, 1, "50")[0] == 0
    code, found = verified(world, 1, "50", "--deep")
    assert code == 65 and len(found[50]["flaws"]) == 1 and "does not match its hash" in found[50]["flaws"][0]
    world.edit(3, 60, items=(*[i for i in world.manifest(3, 60).items if i.name != item.name],))
    code, found = verified(world, 1, "60", "--deep")
    assert code == 65 and any("/state/model/rows is not in the manifest" in flaw for flaw in found[60]["flaws"])


def test_ls_verify(world):
    flip(paths.slot(world.job_dir(0), 0, 2), world.manifest(0, 60).items[0].offset)
    done = ckpt("ls", "--verify", "--json", "--run-dir", world.run_dir, "--job-dir", world.job_dir(0))
    rows = {one["iteration"]: one for one in json.loads(done.stdout)["checkpoints"]}
    assert done.returncode == 65 and {i: one["sound"] for i, one in rows.items()} == {60: False, 50: True, 40: True}
    assert "0-2.h5" in rows[60]["flaws"][0]
    done = ckpt("ls", "--verify", "--run-dir", world.run_dir, "--job-dir", world.job_dir(0))
    assert done.returncode == 65 and "DAMAGED" in done.stdout and done.stdout.count("sound") == 2
    assert "Traceback" not in done.stderr


def prune(world, *arguments):
    argv = ("prune", "--redundancy", *arguments, "--json", "--run-dir", world.run_dir, "--job-dir", world.job_dir(0))
    done = ckpt(*argv)
    (view,) = json.loads(done.stdout)["redundancy"].values()
    return done, {one["name"] for one in view["files"]}, view


def test_prune_of_redundancy(world):
    directory = Path(paths.redundancy(world.job_dir(0)))
    whole = {"0000000050-000000.json", "0000000050-000000.bin"}
    (directory / "0000000030-000000.bin").write_bytes(b"x" * 5000)  # of an encode that was killed before it published
    (directory / ".0000000060-000000.bin.part").write_bytes(b"x")
    (directory / ".0000000060-000000.json.77.abcd.tmp").write_bytes(b"x")
    (directory / "notes.txt").write_text("mine")
    torn = {"0000000030-000000.bin", ".0000000060-000000.bin.part", ".0000000060-000000.json.77.abcd.tmp"}
    done, found, _ = prune(world)
    assert (done.returncode, found) == (0, torn) and torn <= set(os.listdir(directory))
    os.makedirs(f"{world.job_dir(0)}/pins", exist_ok=True)
    with open(paths.pin(world.job_dir(0), 60), "w") as pin:
        fcntl.flock(pin, fcntl.LOCK_SH)  # an encode of 60 is at work
        done, found, view = prune(world, "--yes")
        assert done.returncode == 75 and found == {"0000000030-000000.bin"}
        assert set(view["left"]) == torn - found and "a mover is at it" in done.stderr
    done, found, _ = prune(world, "--yes")
    assert (done.returncode, set(os.listdir(directory))) == (0, {*whole, "notes.txt"})
    # what is durable itself stays, what is older goes
    world.seal_rank(6, world.states[6], 60, 2)
    world.seal_rank(7, world.states[7], 60, 2)
    world.drain(iteration=50)
    assert prune(world)[1] == set()
    world.drain(iteration=60)
    assert prune(world, "--yes")[1] == whole and set(os.listdir(directory)) == {"notes.txt"}
    assert prune(world, "--yes")[0].returncode == 0


def test_prune_follows_no_link(world, tmp_path):
    directory = paths.redundancy(world.job_dir(0))
    os.rename(directory, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", directory)
    (tmp_path / "elsewhere" / "0000000030-000000.bin").write_bytes(b"x")
    done, found, view = prune(world, "--yes")
    assert done.returncode == 1 and found == set() and "no directory of its own" in view["faults"][0]
    done = ckpt("verify", "--json", "--run-dir", world.run_dir, "--job-dir", world.job_dir(0))
    (node,) = json.loads(done.stdout)["nodes"].values()
    assert done.returncode == 65 and "no directory of its own" in node["faults"][0] and "own" in done.stderr
    assert (tmp_path / "elsewhere" / "0000000030-000000.bin").exists()


def test_every_command_shows_an_example():
    for name, command in group.commands.items():
        assert "slurm-resil ckpt " in (command.epilog or ""), name
