"""Every scheme, size of set and pattern of loss that is covered; and those that are not."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path

import pytest
from setworld import ITERATION, members, protect, restore, snapshot, wipe, world
from shardworld import World

from slurm_resil.core import faults, paths, pins
from slurm_resil.core.errors import ConfigError, DataError, ResilError, TryAgainError, UsageError
from slurm_resil.core.schemes import Scheme
from slurm_resil.drain.check import shard_flaws
from slurm_resil.redundancy import check, flow, member, survey

SCHEMES = ("partner", "partner:2", "xor", "rs", "rs:3", "rs:4")


def same(here: World, before: dict[str, bytes]) -> None:
    after = snapshot(here)
    assert sorted(after) == sorted(before)
    assert [path for path in before if before[path] != after[path]] == []


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_loss_that_is_covered_is_made_good(tmp_path, monkeypatch, scheme, nodes):
    monkeypatch.setattr(flow, "SEGMENT_BYTES", 16 << 10)  # several segments, and a short one
    here = world(tmp_path, nodes)
    done = protect(here, scheme)
    losses = min(Scheme.parse(scheme).losses, nodes - 1)
    assert (done.iteration, done.losses, done.already) == (ITERATION, losses, False)
    before = snapshot(here)
    assert len(members(here)) == nodes
    patterns = [p for k in range(1, losses + 1) for p in itertools.combinations(range(nodes), k)]
    for lost in patterns[:: max(1, len(patterns) // 12)]:
        wipe(here, *lost)
        found = restore(here)
        assert found.nodes == tuple(f"node{node}" for node in lost) and found.iteration == ITERATION
        same(here, before)
    assert [shard_flaws(here.job_dir(node), ITERATION) for node in range(nodes)] == [[]] * nodes
    again = restore(here)
    assert again.nodes == () and again.nbytes == 0
    assert protect(here, scheme).already


@pytest.mark.parametrize("scheme", ["xor", "rs", "partner"])
def test_more_losses_than_covered_say_so_and_touch_nothing(tmp_path, scheme):
    here = world(tmp_path, 4)
    losses = protect(here, scheme).losses
    wipe(here, *range(losses + 1))
    before = snapshot(here)
    with pytest.raises(DataError, match=rf"lost {losses + 1} of its nodes \(node0, .*\), it covers {losses}"):
        restore(here)
    after = snapshot(here)
    assert {path: after[path] for path in before} == before


def test_sets_lose_nodes_at_the_same_time(tmp_path):
    here = world(tmp_path, 6, uneven=True)
    protect(here, "xor", set_size=3)
    before = snapshot(here)
    wipe(here, 1, 4)
    assert restore(here).nodes == ("node1", "node4")
    same(here, before)
    wipe(here, 0, 2)  # without a file the sets are made by the places in turn, as the launcher makes them
    with pytest.raises(DataError, match="the set of node0, node2, node4 lost 2"):
        restore(here)
    wipe(here, 4)
    with pytest.raises(DataError, match="nothing is left of the sets that the places of node0, node2, node4"):
        restore(here)


def test_several_ranks_on_a_node_and_nodes_without_a_shard(tmp_path):
    here = world(tmp_path, 6, per_node=3)
    os.makedirs(here.job_dir(2))
    protect(here, "rs", nodes=3)
    before = snapshot(here)
    wipe(here, 0)
    assert restore(here, nodes=3).nodes == ("node0",)
    same(here, before)


def test_replicated_items_are_left_out_and_come_back(tmp_path):
    here = world(tmp_path, 3)
    bytes_of = [sum(item.nbytes for item in here.manifest(rank).items) for rank in range(3)]
    shared = here.states[0]["model/same"].data.nbytes
    done = protect(here, "xor")
    assert done.nbytes < sum(bytes_of) + 3 * 20_000 - 2 * shared
    manifest = member.listed(here.job_dir(0))[0][0]
    names = {item.offset: item for item in here.manifest(0).items}
    left_out = {names[one.offset].name for one in manifest.members[0].shards[0].omitted}
    assert "model/same" in left_out and not left_out & {"rng/cpu", "private/part", "model/rows"}
    before = snapshot(here)
    wipe(here, 1)
    restore(here)
    same(here, before)


def test_a_spare_with_another_name_takes_the_place(tmp_path):
    here = world(tmp_path, 3)
    names = ["node0", "node1", "node2"]
    where = Path(paths.layout(here.run_dir))
    where.write_text(json.dumps({"version": 1, "attempt": 0, "nodes": names, "ranks_per_node": 1}))
    protect(here, "xor")
    before = snapshot(here)
    wipe(here, 1)
    where.write_text(
        json.dumps({"version": 1, "attempt": 1, "nodes": ["spare0", "spare1", "spare2"], "ranks_per_node": 1})
    )
    assert restore(here, names="spare").nodes == ("spare1",)
    same(here, before)


def test_the_next_older_one_is_taken_and_it_is_said_why(tmp_path):
    here = world(tmp_path, 3)
    protect(here, "rs:2")
    here.seal(ITERATION + 1, slot=1)
    protect(here, "xor")
    wipe(here, 0, 1)
    done = restore(here)
    assert done.iteration == ITERATION and done.nodes == ("node0", "node1")
    assert len(done.passed_over) == 1 and f"iteration {ITERATION + 1}: the set of" in done.passed_over[0]
    with pytest.raises(DataError, match="it covers 1"):
        restore(here, iteration=ITERATION + 1)
    with pytest.raises(DataError, match="protects iteration 7"):
        restore(here, iteration=7)


def test_only_a_parity_is_lost(tmp_path):
    here = world(tmp_path, 4)
    protect(here, "rs")
    before = snapshot(here)
    os.unlink(paths.parity(here.job_dir(2), ITERATION, 2))
    os.unlink(paths.member(here.job_dir(3), ITERATION, 3))
    assert restore(here).nodes == ("node2", "node3")
    same(here, before)


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("scheme", ["partner:2", "rs"])
@pytest.mark.parametrize("what", ["parity", "shard"])
def test_what_is_corrupt_counts_as_lost_and_is_named(tmp_path, scheme, what):
    here = world(tmp_path, 4)
    protect(here, scheme)
    before = snapshot(here)
    path = paths.parity(here.job_dir(2), ITERATION, 2) if what == "parity" else here.slot(2)
    offset = next(i for i in here.manifest(2).items if i.name == "private/part").offset
    flip(path, 100 if what == "parity" else offset + 5)
    wipe(here, 1)
    done = restore(here)
    assert done.nodes == ("node1", "node2")
    assert len(done.corrupt) == 1 and path in done.corrupt[0] and "node2" in done.corrupt[0]
    same(here, before)


def test_too_much_is_corrupt(tmp_path):
    here = world(tmp_path, 3)
    protect(here, "xor")
    flip(paths.parity(here.job_dir(2), ITERATION, 2), 100)
    wipe(here, 1)
    with pytest.raises(DataError, match=r"lost 2 of its nodes \(node1, node2\), it covers 1 \(.*hash on node2"):
        restore(here)


def test_a_corrupt_copy_of_a_replicated_item_is_not_taken(tmp_path):
    here = world(tmp_path, 4)
    protect(here, "xor", set_size=2)
    before = snapshot(here)
    for rank in (0, 2):  # the other set
        here.flip(rank, "model/same")
    wipe(here, 1)
    done = restore(here)
    assert done.nodes == ("node1",)
    after = snapshot(here)
    lost = [path for path in before if "/node1/" in path]
    assert lost and all(before[path] == after[path] for path in lost)


ENCODE = ("encode.open", "encode.segment", "encode.verify", "encode.rename", "encode.publish")


@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize("point", ENCODE)
def test_an_error_on_one_node_publishes_nothing(tmp_path, point, when):
    here = world(tmp_path, 3)
    before = snapshot(here)
    faults.load(f"{point}:raise@{when}")
    with pytest.raises(ResilError, match="injected"):
        protect(here, "xor")
    faults.load("")
    assert members(here) == []
    after = snapshot(here)
    assert {path: after[path] for path in before} == before
    assert not any(path.endswith(".part") for path in after)
    assert not protect(here, "xor").already
    assert protect(here, "xor").already


def test_pruning_that_fails_is_no_failure(tmp_path):
    here = world(tmp_path, 2)
    faults.load("encode.prune:raise@*")
    assert protect(here, "xor").iteration == ITERATION


REBUILD = ("rebuild.survey", "rebuild.open", "rebuild.segment", "rebuild.verify", "rebuild.publish", "rebuild.parity")


@pytest.mark.parametrize("point", REBUILD)
def test_a_rebuild_that_fails_can_be_done_again(tmp_path, point):
    here = world(tmp_path, 4)
    protect(here, "rs")
    before = snapshot(here)
    wipe(here, 1, 2)
    faults.load(f"{point}:raise")
    with pytest.raises(ResilError, match="injected"):
        restore(here)
    faults.load("")
    restore(here)
    same(here, before)


def test_stopped_when_asked(tmp_path):
    here = world(tmp_path, 3)
    with pytest.raises(TryAgainError, match="stopped"):
        protect(here, "xor", stop=lambda: True)
    assert members(here) == []
    protect(here, "xor")
    wipe(here, 0)
    with pytest.raises(TryAgainError, match="stopped"):
        restore(here, stop=lambda: True)
    restore(here)


def test_one_node_and_single_protect_nothing(tmp_path):
    here = world(tmp_path, 3)
    with pytest.raises(ConfigError, match="node node2 is alone in its set"):
        path = tmp_path / "sets.json"
        path.write_text(json.dumps({"version": 1, "sets": [["node0", "node1"], ["node2"]]}))
        protect(here, "xor", sets=str(path))
    with pytest.raises(ConfigError, match="protects nothing"):
        protect(here, "single")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 2, "sets": []}', "names no sets"),
        ('{"version": 1, "sets": [["node0", "node1"]]}', "node2 missing"),
        ('{"version": 1, "sets": [["node0", "node1", "node2", "node1"]]}', "node1 named twice"),
        ("{", "not valid JSON"),
    ],
)
def test_a_file_of_sets_that_is_wrong(tmp_path, text, words):
    here = world(tmp_path, 3)
    path = tmp_path / "sets.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        protect(here, "xor", sets=str(path))


def test_only_the_two_newest_stay(tmp_path):
    here = world(tmp_path, 2)
    for number in range(4):
        here.seal(ITERATION + number, slot=number)
        protect(here, "xor")
    kept = {one.iteration for node in range(2) for one in member.listed(here.job_dir(node))[0]}
    assert kept == {ITERATION + 2, ITERATION + 3}
    names = [f"{ITERATION + number:010d}-000000" for number in range(4)]
    there = {f"{name}.{ending}" for name in names[2:] for ending in ("json", "bin")}
    # the next encode writes over the one that went last
    assert set(os.listdir(paths.redundancy(here.job_dir(0)))) == {*there, f".{names[1]}.bin.spare"}


def test_shards_are_pinned_while_they_are_encoded(tmp_path):
    here = world(tmp_path, 2)
    held = []

    def look() -> bool:
        with pins.exclude(here.job_dir(0), ITERATION) as mine:
            held.append(not mine)
        return False

    protect(here, "xor", stop=look)
    assert held and all(held)


def test_a_slot_that_was_written_again_is_noticed(tmp_path):
    here = world(tmp_path, 2)

    def reuse() -> bool:
        with open(here.slot(1), "r+b") as file:
            file.seek(8)
            file.write((9).to_bytes(8, "little"))
        return False

    with pytest.raises(DataError, match="stale"):
        protect(here, "xor", stop=reuse)
    assert members(here) == []


@pytest.mark.parametrize("kind", ["link", "foreign", "directory"])
def test_what_is_not_this_users_own_is_not_followed(tmp_path, kind):
    here = world(tmp_path, 3)
    protect(here, "xor")
    before = snapshot(here)
    path = paths.parity(here.job_dir(1), ITERATION, 1)
    if kind == "foreign":
        if os.geteuid():
            pytest.skip("needs root")
        os.chown(path, 12345, 12345)
    elif kind == "link":
        os.rename(path, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", path)
    else:
        target = paths.redundancy(here.job_dir(1))
        os.rename(target, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", target)
        with pytest.raises(DataError, match="no directory of its own"):
            protect(here, "rs")
        return
    assert restore(here).nodes == ("node1",)
    same(here, before)
    assert not os.path.islink(path) and os.stat(path).st_uid == os.geteuid()


def test_another_world_or_run_is_not_touched(tmp_path):
    here = world(tmp_path, 3)
    protect(here, "xor")
    with pytest.raises(DataError, match="was saved by 3 nodes, the job has 2 now"):
        wipe(here, 2)
        restore(here, nodes=2)


@pytest.mark.parametrize("text", ["xor:2", "rs:0", "rs:17", "mirror", "partner:x", ""])
def test_schemes_that_are_none(text):
    with pytest.raises(UsageError, match=r"takes no number|number of losses|no redundancy scheme"):
        Scheme.parse(text)


@pytest.mark.parametrize("text", ["single", "partner", "partner:2", "xor", "rs", "rs:3"])
def test_schemes_as_they_are_written(text):
    assert str(Scheme.parse(text)) == text


def test_an_encode_and_a_rebuild_of_one_iteration_do_not_meet(tmp_path):
    """Each would put its parities in the other's place, and one of the manifests would tell of the other's bytes."""
    here = world(tmp_path, 3)
    protect(here, "xor")
    os.unlink(paths.parity(here.job_dir(1), ITERATION, 1))
    entered, go = threading.Event(), threading.Event()

    def hold() -> bool:
        entered.set()
        assert go.wait(60)
        return False

    done: list[object] = []
    encode = threading.Thread(target=lambda: done.append(protect(here, "rs:2", stop=hold)))
    encode.start()
    try:
        assert entered.wait(60)
        with pytest.raises(TryAgainError, match="another mover makes"):
            restore(here)
    finally:
        go.set()
        encode.join()
    assert len(done) == 1 and restore(here).nodes == ()
    found = [member.listed(here.job_dir(node))[0][0] for node in range(3)]
    assert {one.kind for one in found} == {"rs"} and len({one.token for one in found}) == 1
    assert [check.flaws(here.job_dir(node), ITERATION, packages=True) for node in range(3)] == [[]] * 3
    assert not [name for name in os.listdir(paths.redundancy(here.job_dir(1))) if name.startswith(".")]


def test_a_rebuild_that_an_encode_has_overtaken_does_not_undo_it(tmp_path, monkeypatch):
    here = world(tmp_path, 3)
    protect(here, "xor")
    os.unlink(paths.parity(here.job_dir(1), ITERATION, 1))
    encoded = threading.Lock()
    look = survey.View.verify

    def late(view: survey.View) -> None:
        look(view)  # after it: what the rebuild goes by is known
        with encoded:
            if not done:
                done.append(protect(here, "rs:2"))

    done: list[object] = []
    monkeypatch.setattr(survey.View, "verify", late)
    with pytest.raises(TryAgainError, match="encoded anew meanwhile"):
        restore(here)
    assert len({member.listed(here.job_dir(node))[0][0].token for node in range(3)}) == 1
    assert restore(here).nodes == ()
