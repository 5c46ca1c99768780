"""Shards that fit together and those that do not."""

from __future__ import annotations

import pytest

from slurm_resil.comm import local
from slurm_resil.core.errors import DataError
from slurm_resil.drain import rounds
from slurm_resil.drain.plan import VALUES, Head, Plan
from slurm_resil.drain.planning import plan
from slurm_resil.format.manifest import Extent, Item
from slurm_resil.format.world import words


def rows(start: int, count: int, *, total: int = 8, name: str = "w", xxh3: str = "", local: int = 0) -> Item:
    extents = (Extent(local=(local, 0), start=(start, 0), shape=(count, 2)),) if count else ()
    return Item(
        name=name,
        dtype="torch.float32",
        shape=(count + local, 2),
        offset=4096,
        nbytes=(count + local) * 8,
        sharing="sharded",
        global_shape=(total, 2),
        extents=extents,
        xxh3=xxh3 or f"rows {start}",
    )


def plain(name: str, xxh3: str, *, sharing: str = "plain", dtype: str = "torch.float32", nbytes: int = 400) -> Item:
    return Item(name=name, dtype=dtype, shape=(nbytes // 4,), offset=4096, nbytes=nbytes, sharing=sharing, xxh3=xxh3)


def shard(
    rank: int, *items: Item, world: int = 2, mover: int | None = None, **changes: object
) -> tuple[Head, list[Item]]:
    fields = {"run_id": "r", "job_id": 1, "attempt": 0, "iteration": 5, "world_size": world, **changes}
    head = Head(mover=rank if mover is None else mover, node=f"n{rank}", rank=rank, **fields)
    return head, [*items, plain(VALUES, f"values {rank}", dtype="json", sharing="private", nbytes=12)]


def make(shards, movers: int) -> list[Plan]:
    """Plans of all movers."""

    def one(comm) -> Plan:
        own = [(head, items) for head, items in shards if head.mover == comm.rank]
        return plan(comm, [head for head, _ in own], {head.rank: items for head, items in own})

    return local.run(movers, one)


def targets(plans) -> dict[tuple[str, int | None], int]:
    assert all(other.targets == plans[0].targets and other.loads == plans[0].loads for other in plans)
    for mover, one in enumerate(plans):
        assert sum(piece.nbytes for piece in one.pieces) == one.loads[mover]
    assert sum(plans[0].loads) == sum(target.nbytes for target in plans[0].targets)
    return {(target.name, target.rank): target.nbytes for target in plans[0].targets}


def test_the_plan_does_not_depend_on_the_order_of_the_shards():
    shards = [
        shard(rank, rows(2 * rank, 2, total=16), plain("p", "same"), world=8, mover=rank // 2) for rank in range(8)
    ]
    a, b = make(shards, 4), make(shards[::-1], 4)
    assert a[0].targets == b[0].targets and a[0].loads == b[0].loads


def test_datasets_are_in_the_order_of_their_names():
    names = [f"{layer}/{kind}" for layer in range(5) for kind in "ab"]
    made = make([shard(rank, *(plain(name, "x") for name in names[:: 1 - 2 * rank])) for rank in range(2)], 2)
    assert [(t.name, t.rank) for t in made[0].targets] == [*((n, None) for n in names), (VALUES, 0), (VALUES, 1)]


def test_equal_plain_items_once_others_per_rank():
    a = [plain("once", "x"), plain("differs", "0"), plain("mine", "x", sharing="private")]
    b = [plain("once", "x"), plain("differs", "1"), plain("mine", "x", sharing="private")]
    assert set(targets(make([shard(0, *a), shard(1, *b)], 2))) == {
        ("once", None),
        *((name, rank) for name in ("differs", "mine", VALUES) for rank in (0, 1)),
    }


@pytest.mark.parametrize("change", [{"dtype": "torch.int32"}, {"nbytes": 404}])
def test_plain_items_of_another_kind_are_per_rank(change):
    found = targets(make([shard(0, plain("p", "x")), shard(1, plain("p", "x", **change))], 2))
    assert ("p", None) not in found and ("p", 1) in found


def test_an_item_that_only_some_ranks_have():
    some = [shard(0, plain("stage0", "x"), world=3), shard(1, world=3), shard(2, plain("stage0", "x"), world=3)]
    assert targets(make(some, 3))["stage0", None] == 400


def test_sharded_pieces_cover_the_target():
    plans = make([shard(0, rows(0, 5)), shard(1, rows(5, 3))], 2)
    assert targets(plans)["w", None] == 64
    assert plans[0].loads == (40 + 12, 24 + 12)


def test_replicas_are_written_once_and_shared():
    shards = [shard(rank, rows(0 if rank < 2 else 400, 400, total=800), world=4) for rank in range(4)]
    plans = make(shards, 4)
    loads = plans[0].loads
    assert targets(plans)["w", None] == 800 * 8
    assert sum(loads) == 800 * 8 + 48 and max(loads) <= 1.5 * sum(loads) / 4
    assert sum(len(one.checks) for one in plans) == 2 + 4  # each distinct part, and the values


def test_two_ranks_on_one_mover_do_not_write_twice():
    shards = [shard(rank, plain("p", "x", nbytes=4000), mover=0) for rank in range(2)]
    assert make(shards, 1)[0].loads == (4024,)


@pytest.mark.parametrize("field", ["run_id", "job_id", "attempt", "iteration", "world_size"])
def test_shards_of_different_checkpoints(field):
    odd = {field: "other" if field == "run_id" else 3}
    with pytest.raises(DataError, match=rf"{field} is .* for rank 0 on n0, .* for rank 1 on n1"):
        make([shard(0), shard(1, **odd)], 2)


@pytest.mark.parametrize(
    ("shards", "words_said"),
    [
        ([], "no shard"),
        ([shard(1, world=4), shard(2, world=4, mover=0)], r"no shard of ranks 0,3 \(world size 4\)"),
        ([shard(0), shard(1), shard(1)], "rank 1 there twice"),
        ([shard(0), shard(1), shard(2, mover=0)], "rank 2 there twice or beyond"),
        (
            [shard(0, rows(0, 4)), shard(1, rows(5, 3))],
            r"w \[8, 2\]: \[4:5, 0:2\] is missing in the shards of ranks 0-1",
        ),
        ([shard(0, rows(0, 5)), shard(1, rows(4, 4))], r"\[4:5, 0:2\] is there 2 times"),
        ([shard(0, rows(0, 4)), shard(1, rows(4, 5))], r"\[4:9, 0:2\] is not inside \[8, 2\]"),
        ([shard(0, rows(0, 4)), shard(1)], "is missing in the shards of rank 0"),
        (
            [shard(0, rows(0, 8, xxh3="a")), shard(1, rows(0, 8, xxh3="b"))],
            "rank 0 on n0 and rank 1 on n1 hold the same",
        ),
        ([shard(0, rows(0, 4)), shard(1, rows(4, 4, total=9))], "global_shape is"),
        ([shard(0, rows(0, 4)), shard(1, plain("w", "x"))], "sharing is"),
        ([shard(0, plain("p", "x"), plain("p", "x")), shard(1)], "p is there twice in the shard of rank 0"),
    ],
)
def test_what_does_not_fit(shards, words_said):
    with pytest.raises(DataError, match=words_said):
        make(shards, 2)


def test_two_datasets_of_one_name():
    mine = plain(VALUES, "x", sharing="private")
    with pytest.raises(DataError, match="two datasets would have the name ranks/0/values"):
        make([shard(0, mine), shard(1, mine)], 2)


def test_an_error_of_one_planner_reaches_every_mover():
    shards = [shard(0, rows(0, 4)), shard(1, rows(5, 3))]
    said = []

    def one(comm):
        head, items = shards[comm.rank]
        with pytest.raises(DataError) as caught:
            plan(comm, [head], {head.rank: items})
        said.append(str(caught.value))

    local.run(2, one)
    assert said[0] == said[1] and "is missing" in said[0]


def test_extent_outside_of_its_tensor():
    item = rows(0, 8)
    bad = Item(**{**vars(item), "extents": (Extent(local=(1, 0), start=(0, 0), shape=(8, 2)),)})
    with pytest.raises(DataError, match="outside of its tensor"):
        make([shard(0, bad, world=1)], 1)


def test_rounds_are_bounded_and_complete():
    size = 3 << 30  # more than a 32-bit count
    shards = [shard(rank, plain("big", "x", nbytes=size), rows(2 * rank, 2, total=4)) for rank in range(2)]
    for mover, own in enumerate(make(shards, 2)):
        cut = list(rounds.cut(own, own.pieces, lambda: 64 << 20))
        assert all(0 < sum(piece.nbytes for piece in one) <= 64 << 20 for one in cut)
        joined = [(p.source, p.part, p.first, p.last) for one in cut for p in one]
        assert sum(last - first for *_, first, last in joined) == own.loads[mover]
        assert len(joined) == len(set(joined))
        assert len(cut) == -(-own.loads[mover] // (64 << 20))


def test_rounds_bound_the_number_of_runs():
    item = Item(
        name="thin",
        dtype="torch.int16",
        shape=(1000, 1),
        offset=4096,
        nbytes=2000,
        sharing="sharded",
        global_shape=(1000, 2),
        extents=(Extent(local=(0, 0), start=(0, 0), shape=(1000, 1)),),
        xxh3="a",
    )
    other = Item(**{**vars(item), "xxh3": "b", "extents": (Extent(local=(0, 0), start=(0, 1), shape=(1000, 1)),)})
    own = make([shard(0, item), shard(1, other)], 2)[0]
    cut = list(rounds.cut(own, own.pieces, lambda: 1 << 20, max_runs=64))
    assert len(cut) == 16
    assert all(own.sources[p.source].runs(p.part, p.first, p.last).length.size <= 64 for one in cut for p in one)
    assert rounds.count_runs(own, own.pieces) == 1001


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([1, 2, 3, 7], "ranks 1-3,7"), ([0, 2], "ranks 0,2")])
def test_words(ranks, text):
    assert words(ranks) == text
