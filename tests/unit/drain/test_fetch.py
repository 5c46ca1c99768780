"""A drained file is staged on several "nodes" (directories), read once, and sent to those who need it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from shardworld import ITERATION, World, build

from slurm_resil.comm import local
from slurm_resil.core import faults, layout, paths
from slurm_resil.core.errors import ConfigError, DataError, StorageError, TryAgainError
from slurm_resil.core.layout import Layout
from slurm_resil.drain import collective, fetch, needs, publishing, spread, spreading, staging
from slurm_resil.format import staged
from slurm_resil.format.manifest import DrainedManifest, digest

BLOCK = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many blocks and pieces of little data."""
    for module in (collective, publishing):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(spreading, "READ_BYTES", 2 * BLOCK)
    monkeypatch.setattr(fetch, "READ_BYTES", 2 * BLOCK)
    monkeypatch.setattr(spreading, "_PAUSE_S", 0.01)


def drained(root: Path, *, ranks: int = 3, per_node: int = 1, scale: int = 20) -> World:
    """A durable checkpoint of nodes that have all lost their burst buffers, and the layout of the run."""
    world = build(root, ranks=ranks, per_node=per_node, scale=scale)
    world.seal()
    world.drain()
    for node in range(world.nodes):
        os.rename(world.job_dir(node), f"{world.job_dir(node)}.lost")
    places(world, [f"n{node}" for node in range(world.nodes)], per_node)
    return world


def places(world: World, nodes: list[str], per_node: int) -> None:
    layout.save(world.run_dir, Layout(nodes=tuple(nodes), ranks_per_node=per_node), 0)


def run(world: World, *, nodes: int | None = None, **options) -> fetch.Outcome:
    def one(comm) -> fetch.Outcome:
        return fetch.fetch(
            comm,
            run_dir=world.run_dir,
            job_dir=world.job_dir(comm.rank),
            iteration=None,
            env={"SLURMD_NODENAME": f"n{comm.rank}"},
            **options,
        )

    outcomes = local.run(nodes or world.nodes, one)
    assert len({(one.staged_bytes, one.kept_bytes, one.read_bytes, one.words) for one in outcomes}) == 1
    return outcomes[0]


def manifest_of(world: World) -> DrainedManifest:
    return DrainedManifest.load(paths.drained_manifest(world.run_dir, ITERATION))


def check(world: World, node: int, blocks: np.ndarray | None = None) -> np.ndarray:
    """What is staged on a node is right, and it is what was to be staged; returns which blocks."""
    manifest = manifest_of(world)
    with staged.find(world.job_dir(node), manifest) as copy:
        found = copy._there.copy()
        raw = Path(copy.path).read_bytes()
    for index in np.flatnonzero(found):
        assert digest(raw[index * BLOCK : (index + 1) * BLOCK]) == manifest.blocks[index]
    assert blocks is None or np.array_equal(found, blocks)
    return found


def needed(world: World, node: int) -> np.ndarray:
    first = node * world.per_node
    ranks = range(first, first + world.per_node)
    return needs.need(manifest_of(world), world.job_dir(node), ranks, world.ranks).blocks


def want(world: World, rank: int) -> None:
    """Say what a rank has said of its tensors when it trained here."""
    specs = []
    for name, one in world.states[rank].items():
        extents = [[*vars(extent).values()] for extent in one.extents]
        attributes = {"global_shape": one.global_shape, "extents": extents} if one.sharing == "sharded" else {}
        specs.append([f"/state/{name}", f"numpy.{one.data.dtype.str}", one.data.shape, attributes])
    path = paths.described(world.job_dir(rank // world.per_node), f"wanted-{rank}")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_text(json.dumps({"rank": rank, "specs": specs}))


# what is staged


def test_every_block_is_read_once_and_is_on_every_node_that_needs_it(tmp_path):
    world = drained(tmp_path)
    manifest = manifest_of(world)
    outcome = run(world)
    for node in range(3):
        check(world, node, needed(world, node))
    wanted = np.logical_or.reduce([needed(world, node) for node in range(3)])
    assert sum(outcome.read_bytes) == np.count_nonzero(wanted) * BLOCK - (-manifest.file_bytes % BLOCK) * wanted[-1]
    assert max(outcome.read_bytes) <= sum(outcome.read_bytes) / 3 + 3 * BLOCK  # the work is shared
    assert (outcome.nodes, outcome.of, outcome.kept_bytes) == (3, 3, 0)
    assert outcome.words == ()


def test_the_whole_file_if_that_is_wanted(tmp_path):
    world = drained(tmp_path, ranks=2)
    outcome = run(world, what=fetch.ALL)
    whole = Path(world.run_dir, manifest_of(world).file).read_bytes()
    for node in range(2):
        assert Path(paths.staged(world.job_dir(node), ITERATION)).read_bytes() == whole
    assert sum(outcome.read_bytes) == len(whole) and outcome.staged_bytes == 2 * len(whole)


def test_only_what_the_ranks_have_said_they_want(tmp_path):
    world = drained(tmp_path, ranks=4, per_node=2, scale=200)
    for rank in range(4):
        want(world, rank)
    outcome = run(world)
    found = [check(world, node, needed(world, node)) for node in range(2)]
    assert not all(blocks.all() for blocks in found)
    manifest = manifest_of(world)
    raw = Path(world.run_dir, manifest.file).read_bytes()
    rows = next(item for item in manifest.items if item.name == "model/rows")
    for node, blocks in enumerate(found):
        # the rows of its ranks are all there, by what they are and not by how that was found out
        for rank in range(2 * node, 2 * node + 2):
            (extent,) = world.states[rank]["model/rows"].extents
            start = rows.offset + extent.start[0] * 17 * 4
            assert blocks[start // BLOCK : (start + extent.shape[0] * 17 * 4 - 1) // BLOCK + 1].all()
    assert sum(outcome.read_bytes) < len(raw)
    assert os.stat(paths.staged(world.job_dir(0), ITERATION)).st_blocks * 512 < len(raw)  # sparse


def test_a_node_that_has_its_shards_needs_nothing_and_helps(tmp_path):
    world = drained(tmp_path, ranks=3)
    for node in (0, 2):
        os.rename(f"{world.job_dir(node)}.lost", world.job_dir(node))
    outcome = run(world)
    assert (outcome.nodes, outcome.of) == (1, 1)
    assert not os.path.exists(paths.fetched(world.job_dir(0)))
    check(world, 1, needed(world, 1))
    assert min(outcome.read_bytes) > sum(outcome.read_bytes) / 4  # all read for it


def test_shards_of_another_attempt_are_no_reason_not_to_stage(tmp_path):
    world = drained(tmp_path, ranks=2)
    os.rename(f"{world.job_dir(0)}.lost", world.job_dir(0))
    world.edit(0, attempt=5)
    assert run(world).of == 2


def test_a_newer_checkpoint_in_the_burst_buffers_is_what_will_be_restored(tmp_path):
    world = drained(tmp_path, ranks=2)
    world.seal(ITERATION + 1)
    outcome = run(world)
    assert outcome.of == 0 and "a newer checkpoint" in outcome.words[0]
    os.unlink(paths.manifest(world.job_dir(1), ITERATION + 1, 1))
    assert run(world).of == 2
    member = paths.member(world.job_dir(0), ITERATION + 1, 0)
    os.makedirs(os.path.dirname(member))
    Path(member).write_text("")
    assert run(world).of == 0  # there is redundancy, and it is rebuilt


def test_another_number_of_ranks_may_need_everything(tmp_path):
    world = drained(tmp_path, ranks=3)
    places(world, ["n0", "n1"], 2)
    run(world, nodes=2)
    for node in range(2):
        assert check(world, node).all()


def test_a_node_without_a_place_stages_everything(tmp_path):
    """A standby node, or a prolog's process."""
    world = drained(tmp_path, ranks=2)
    places(world, ["other0", "other1"], 1)
    outcome = run(world, nodes=1)
    assert check(world, 0).all() and outcome.nodes == 1


# kept and made anew


def test_what_is_there_and_right_is_kept(tmp_path):
    world = drained(tmp_path, ranks=2)
    first = run(world)
    again = run(world)
    assert again.staged_bytes == 0 and again.kept_bytes == first.staged_bytes and sum(again.read_bytes) == 0
    path = paths.staged(world.job_dir(1), ITERATION)
    index = int(np.flatnonzero(check(world, 1))[2])
    with open(path, "r+b") as file:
        file.seek(index * BLOCK + 5)
        file.write(b"damaged")
    mended = run(world)
    assert mended.staged_bytes == sum(mended.read_bytes) == BLOCK
    check(world, 1, needed(world, 1))


def test_a_copy_of_an_older_iteration_goes(tmp_path):
    world = drained(tmp_path, ranks=2)
    run(world)
    for node in range(2):
        os.rename(f"{world.job_dir(node)}.lost/slots", f"{world.job_dir(node)}/slots")
        os.rename(f"{world.job_dir(node)}.lost/manifests", f"{world.job_dir(node)}/manifests")
    world.seal(ITERATION + 5)
    world.drain(iteration=ITERATION + 5)
    for node in range(2):
        os.unlink(paths.manifest(world.job_dir(node), ITERATION + 5, node))
    run(world)
    for node in range(2):
        names = sorted(os.listdir(paths.fetched(world.job_dir(node))))
        assert names == [f"ckpt-{ITERATION + 5:010d}.h5", f"ckpt-{ITERATION + 5:010d}.json"]


@pytest.mark.parametrize("point", ["fetch.survey", "fetch.open", "fetch.publish"])
def test_an_error_of_the_system_is_the_same_for_all_or_of_one_node(tmp_path, point):
    world = drained(tmp_path, ranks=2)
    faults.load(f"{point}:raise")
    if point == "fetch.open":
        outcome = run(world)
        assert outcome.nodes == 1 and "stages nothing" in outcome.words[0]
    else:
        with pytest.raises(Exception, match="injected at"):
            run(world)
    faults.load("")
    run(world)
    for node in range(2):
        check(world, node, needed(world, node))


def test_no_room_is_said_with_numbers_and_takes_no_space(tmp_path, monkeypatch):
    world = drained(tmp_path, ranks=2)
    monkeypatch.setattr(staging, "free_bytes", lambda fd, where: 10 * BLOCK if "node1" in where else 1 << 40)
    outcome = run(world)
    (words,) = outcome.words
    assert words.startswith("n1 stages nothing, its ranks read the file: ") and f"{10 * BLOCK} bytes free" in words
    assert (outcome.nodes, outcome.of) == (1, 2)
    check(world, 0, needed(world, 0))
    assert os.listdir(paths.fetched(world.job_dir(1))) == []


def test_space_that_runs_out_meanwhile_is_given_back(tmp_path):
    world = drained(tmp_path, ranks=2)
    faults.load("fetch.write:raise@5")
    outcome = run(world)
    assert outcome.nodes == 1 and "stages nothing" in outcome.words[0]
    assert sorted(len(os.listdir(paths.fetched(world.job_dir(node)))) for node in range(2)) == [0, 2]


def test_two_fetches_at_once(tmp_path):
    world = drained(tmp_path, ranks=2)
    os.makedirs(world.job_dir(0))
    with staging.Staging(world.job_dir(0), manifest_of(world)):
        outcome = run(world)
    assert outcome.nodes == 1 and "another fetch is at work" in outcome.words[0]


# faults


def test_a_damaged_block_of_the_file_is_named_and_staged_nowhere(tmp_path):
    world = drained(tmp_path, ranks=2)
    manifest = manifest_of(world)
    item = next(item for item in manifest.items if item.name == "model/same")
    with open(Path(world.run_dir, manifest.file), "r+b") as file:
        file.seek(item.offset + 9)
        file.write(b"\xff\x00\xff")
    with pytest.raises(DataError, match=r"block \d+ is damaged.*model/same"):
        run(world)
    for node in range(2):
        expected = needed(world, node)
        expected[(item.offset + 9) // BLOCK] = False
        check(world, node, expected)


def test_what_is_damaged_on_the_way_is_left_out(tmp_path, monkeypatch):
    world = drained(tmp_path, ranks=2)
    send = local.LocalCommunicator.isend
    hit = []

    def bad(self, data, to):
        if to == 1 and not hit:
            hit.append(to)
            data = data.copy()
            data[7] ^= 1
        return send(self, data, to)

    monkeypatch.setattr(local.LocalCommunicator, "isend", bad)
    outcome = run(world)
    assert outcome.words == ("1 blocks have reached n1 damaged, its ranks read them themselves",)
    assert (outcome.nodes, outcome.of) == (1, 2)
    found = check(world, 1)
    assert np.count_nonzero(needed(world, 1) & ~found) == 1


def test_a_read_that_fails_now_and_then_is_tried_again(tmp_path):
    world = drained(tmp_path, ranks=2)
    faults.load("fetch.read:raise@2")
    run(world)
    for node in range(2):
        check(world, node, needed(world, node))


def test_storage_that_refuses_leaves_what_was_staged_until_then(tmp_path, monkeypatch):
    world = drained(tmp_path, ranks=2)
    pread = spreading.fsio.pread_into
    size = manifest_of(world).file_bytes

    def refuse(fd, view, offset, name):
        if world.run_dir in name and offset > size // 2:
            raise OSError(5, "Input/output error", name)
        pread(fd, view, offset, name)

    monkeypatch.setattr(spreading.fsio, "pread_into", refuse)
    with pytest.raises(StorageError, match="reading"):
        run(world)
    monkeypatch.undo()
    monkeypatch.setattr(fetch, "READ_BYTES", 2 * BLOCK)
    half = np.count_nonzero(check(world, 0))
    assert half > 0
    again = run(world)
    assert again.kept_bytes > 0
    check(world, 0, needed(world, 0))


def test_stop_keeps_what_is_staged(tmp_path):
    world = drained(tmp_path, scale=200)
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 4

    with pytest.raises(TryAgainError, match="stopped as asked"):
        run(world, stop=stop)
    before = sum(np.count_nonzero(check(world, node)) for node in range(3))
    again = run(world)
    assert 0 < before * BLOCK <= again.kept_bytes + 3 * BLOCK
    for node in range(3):
        check(world, node, needed(world, node))


@pytest.mark.parametrize("waits", [True, False])
def test_a_fetch_that_ranks_have_waited_for_long_enough_ends_by_itself(tmp_path, monkeypatch, waits):
    world = drained(tmp_path, scale=200)
    monkeypatch.setattr(spreading, "GRACE_S", -1e9)
    monkeypatch.setattr(fetch.staged, "waited_for", lambda job_dir: waits and "node2" in job_dir)
    outcome = run(world, cap_bytes_s=None if not waits else 1e12)
    assert any("the ranks waited as long" in words for words in outcome.words) is waits
    assert outcome.nodes == (0 if waits else 3)
    for node in range(3):
        assert check(world, node).any()


def test_a_rank_that_waits_is_heard_and_lifts_the_cap(tmp_path):
    """At the cap this would take minutes."""
    world = drained(tmp_path, ranks=2, scale=400)
    size = manifest_of(world).file_bytes
    rank = threading.Thread(target=wait_for_it, args=(world,))
    rank.start()
    began = time.monotonic()
    outcome = run(world, cap_bytes_s=size / 300)
    rank.join()
    assert time.monotonic() - began < 100
    assert os.path.exists(paths.fetch_waited_for(world.job_dir(1)))
    assert outcome.nodes == 2 or any("the ranks waited as long" in words for words in outcome.words)


def wait_for_it(world: World) -> None:
    while staged.wait(world.job_dir(1), ITERATION) < 0.04:
        time.sleep(0.001)


def test_nothing_is_durable(tmp_path):
    world = build(tmp_path, ranks=1)
    with pytest.raises(ConfigError, match="does not exist"):
        run(world)
    os.makedirs(world.run_dir)
    with pytest.raises(DataError, match="no checkpoint in"):
        run(world)


# the plan


def test_the_plan_shares_the_reads_and_leaves_what_is_own_with_its_owner():
    own = np.zeros((4, 400), np.bool_)
    for node in range(4):
        own[node, 100 * node : 100 * node + 100] = True
    plan = spread.pieces([spread.packed(row) for row in own], 400, 2)
    assert all(piece.takers == {piece.reader} for piece in plan)
    assert [piece.reader for piece in plan[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]  # all are at work at once
    one = np.zeros((4, 400), np.bool_)
    one[2, 7:399] = True
    plan = spread.pieces([spread.packed(row) for row in one], 400, 2)
    loads = [sum(p.stop - p.first for p in plan if p.reader == node) for node in range(4)]
    assert sum(loads) == 392 and max(loads) <= 392 / 4 + 4
    assert all(piece.takers == {2} for piece in plan)


@pytest.mark.parametrize("seed", range(5))
def test_every_block_that_is_lacking_is_in_exactly_one_piece(seed):
    rng = np.random.default_rng(seed)
    lacks = rng.random((5, 9001)) < rng.random((5, 1)) ** 2
    plan = spread.pieces([spread.packed(row) for row in lacks], 9001, 3)
    seen = np.zeros(9001, int)
    for piece in plan:
        assert 0 < piece.stop - piece.first <= 3
        seen[piece.first : piece.stop] += 1
        for node in range(5):
            assert (lacks[node, piece.first : piece.stop] == (node in piece.takers)).all()
        assert {*piece.others} == {*piece.takers} - {piece.reader}
    assert np.array_equal(seen, lacks.any(axis=0))


def test_a_terabyte_on_a_thousand_nodes_is_planned_at_once():
    row = spread.packed(np.ones(262144, np.bool_))
    began = time.process_time()
    plan = spread.pieces([row] * 1000, 262144, 2)
    assert time.process_time() - began < 15  # two, on a machine that has nothing else to do
    assert len(plan) == 131072 and {piece.reader for piece in plan} == {*range(1000)}
