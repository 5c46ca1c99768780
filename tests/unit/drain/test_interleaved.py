"""Windows of interleaved tensors, and the exchange that puts narrow runs together, against the obvious."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from shardworld import World, build, tile

from slurm_resil.comm import local
from slurm_resil.comm.base import Runs
from slurm_resil.drain import aggregate, interleaved, rounds
from slurm_resil.drain.aggregate import Gatherer
from slurm_resil.drain.interleaved import Windows, divide
from slurm_resil.drain.planning import plan as make
from slurm_resil.drain.shards import Slots
from slurm_resil.format import sealed


def cut_by_columns(world: World, name: str, rows: int, widths: list[int]) -> None:
    """Add a tensor of which each rank has some columns."""
    whole = np.random.default_rng(rows).integers(0, 1 << 30, (rows, sum(widths)), np.int32)
    starts = [sum(widths[:rank]) for rank in range(len(widths))]
    parts = tile(whole, [[(0, rows)], list(zip(starts, widths, strict=True))])
    for state, part in zip(world.states, parts, strict=True):
        state[name] = part
    world.expected[f"state/{name}"] = whole


@pytest.mark.parametrize("widths", [[8, 8, 8], [1, 30, 5], [0, 3, 40]])
@pytest.mark.parametrize("buffer_bytes", [4096 * 5, 1 << 20])
def test_uneven_columns_are_written_in_wide_runs(tmp_path, monkeypatch, widths, buffer_bytes):
    """However different the shares are, each mover writes ranges and not columns."""
    world = build(tmp_path, ranks=3)
    cut_by_columns(world, "model/wide", 4000, widths)
    world.seal()
    runs: list[int] = []
    write = local.LocalFile.write

    def counting(self, data, what):
        merged = what.merged()
        runs.extend(merged.length.tolist())
        write(self, data, what)

    monkeypatch.setattr(local.LocalFile, "write", counting)
    outcome = world.drain(buffer_bytes=buffer_bytes)
    world.check()
    nbytes = 4000 * sum(widths) * 4
    assert sum(size for size in runs if size >= 512) >= 0.9 * nbytes
    assert max(outcome.written_bytes) <= 1.2 * sum(outcome.written_bytes) / 3


def test_mpi_may_get_them_as_they_are(tmp_path, monkeypatch):
    world = build(tmp_path, ranks=2)
    cut_by_columns(world, "model/wide", 500, [4, 4])
    world.seal()
    monkeypatch.setattr(aggregate.Gatherer, "gather", lambda *_: pytest.fail("gathered"))
    world.drain(gather=False)
    world.check()


def planned(world: World) -> list[tuple[object, list[int | None]]]:
    """Plans of all movers, and places as if the data were alone in the file."""

    def one(comm):
        shards, _ = sealed.load(world.job_dir(comm.rank), 40)
        slots = Slots(world.job_dir(comm.rank), shards, comm.rank)
        slots.close()
        made = make(comm, slots.heads, slots.items)
        offsets, at = [], 1234
        for target in made.targets:
            offsets.append(at if target.nbytes else None)
            at += target.nbytes
        return made, offsets

    return local.run(world.nodes, one)


@pytest.mark.parametrize("room", [3000, 50_000, 1 << 30])
def test_windows_hold_everything_once_and_no_more_than_there_is_room(tmp_path, room):
    world = build(tmp_path, ranks=3)
    cut_by_columns(world, "model/wide", 1000, [2, 20, 7])
    world.seal()
    plans = planned(world)
    targets = sorted({target for made, _ in plans for target in interleaved.narrow(made)})
    movers = [Windows(made, offsets, targets) for made, offsets in plans]
    begin, most = movers[0].begin, 0
    pieces: list[list] = [[] for _ in movers]
    while begin < movers[0].end:
        end = min(one.reach(begin, room) for one in movers)
        assert end > begin and (end % 4096 == 0 or end == movers[0].end)
        for one, found in zip(movers, pieces, strict=True):
            cut = one.cut(begin, end)
            most = max(most, sum(piece.nbytes for piece in cut))
            found += cut
        begin = end
    assert most <= room + 4096
    for (made, _), found in zip(plans, pieces, strict=True):
        want = [p for p in made.pieces if made.sources[p.source].target in targets]
        assert sum(piece.nbytes for piece in found) == sum(piece.nbytes for piece in want)
        joined: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for piece in found:
            joined.setdefault((piece.source, piece.part), []).append((piece.first, piece.last))
        for spans in joined.values():
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert rounds.count_runs(plans[1][0], pieces[1]) > 0


@pytest.mark.parametrize("seed", range(40))
def test_the_exchange_against_the_obvious(seed):
    """Runs of random sizes and places, some missing as after an earlier drain, between four movers."""
    draw = random.Random(seed)
    ranks, size = 4, draw.choice([50, 5000, 40_000])
    data = np.random.default_rng(seed).integers(1, 255, size, np.uint8)
    owner = np.full(size, -1)
    at = 0
    while at < size:
        each, count = draw.randint(1, 40), draw.randint(1, 30)
        for number in range(count):
            owner[at : at + each] = (number + seed) % ranks if draw.random() < 0.9 else -1
            at += each
    spans = [(0, size // 3), (size // 2, size)]
    for begin, end in ((size // 3, size // 2),):
        owner[begin:end] = -1

    def work(comm):
        mine = np.flatnonzero(owner == comm.rank)
        edges = np.flatnonzero(np.diff(mine) != 1) + 1
        parts = np.split(mine, edges) if mine.size else []
        order = draw.sample(range(len(parts)), len(parts)) if comm.rank == 0 else range(len(parts))
        target = np.array([parts[i][0] for i in order], np.int64)
        length = np.array([parts[i].size for i in order], np.int64)
        source = np.cumsum(length) - length
        own = np.concatenate([np.empty(0, np.uint8), *(data[parts[i]] for i in order)])
        gatherer = Gatherer(comm)
        for _ in range(2):  # buffers are used again
            out, runs = gatherer.gather(
                own, Runs(source=source, target=target, length=length), divide(spans, comm.size)
            )
        return out.copy(), runs

    found = np.zeros(size, np.uint8)
    seen = np.zeros(size, int)
    for out, runs in local.run(ranks, work):
        for a, b, n in zip(runs.source, runs.target, runs.length, strict=True):
            found[b : b + n] = out[a : a + n]
            seen[b : b + n] += 1
    want = np.where(owner >= 0, data, 0)
    assert (found == want).all() and (seen == (owner >= 0)).all()


def test_parts_are_even_and_cut_at_pages():
    parts = divide([(4096, 4096 * 101), (4096 * 200, 4096 * 300)], 3)
    sizes = [sum(end - begin for begin, end in part) for part in parts]
    assert sum(sizes) == 4096 * 200 and max(sizes) - min(sizes) <= 2 * 4096
    assert all(place % 4096 == 0 for part in parts for span in part for place in span)
    assert divide([(5, 6)], 3) in ([[(5, 6)], [], []], [[], [], [(5, 6)]], [[], [(5, 6)], []])
