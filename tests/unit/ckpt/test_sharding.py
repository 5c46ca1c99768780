"""Distributed tensors: extents against torch's own gathering, FSDP2 saved and restored by real ranks over gloo."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ckptworld as w
import pytest
import torch

from slurm_resil.core import paths
from slurm_resil.core.errors import StateError
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch

RANK = str(Path(__file__).parent / "fsdp_rank.py")


def ranks(directory: Path, world: int, *actions: str) -> list[list[dict]]:
    """Run all ranks; returns their reports by action and rank."""
    directory.mkdir()
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = []
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(directory / f"log-{rank}", "w+")) for rank in range(world)]
        try:
            for rank, log in enumerate(logs):
                argv = [sys.executable, "-W", "ignore", RANK, str(rank), str(world), str(directory), *actions]
                started.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log))
            codes = [process.wait(timeout=240) for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    text = "".join((directory / f"log-{rank}").read_text()[-3000:] for rank in range(world))
    assert codes == [0] * world, text
    return [
        [json.loads((directory / f"{index}-{rank}.json").read_text()) for rank in range(world)]
        for index in range(len(actions))
    ]


def full(reports: list[dict]) -> dict[str, str]:
    """Everything that is the same on all ranks, by its whole tensors, distributed or not."""
    found = [{**report["at"]["plain"], **report["at"]["full"]} for report in reports]
    own = {"generator", "norm.running_mean", "norm.running_var"}
    found = [{name: text for name, text in one.items() if name not in own} for one in found]
    assert all(one == found[0] for one in found)
    assert len(found[0]) > 40
    return found[0]


@dataclass(frozen=True)
class Campaign:
    """Everything that was saved and restored; few processes, because each takes seconds to start."""

    root: Path
    two: list[list[dict]]
    four: list[list[dict]]
    three: list[list[dict]]
    again: list[list[dict]]


TWO = ("save:fsdp:B", "drain:fsdp:B", "save:tp-only:E", "drain:tp-only:E")
FOUR = (
    *("drained:fsdp:B", "save:fsdp:A", "local:fsdp:A", "local:fsdp:A", "drain:fsdp:A", "drained:fsdp:A"),
    *("save:hsdp:C", "local:hsdp:C", "drain:hsdp:C", "drained:hsdp:C"),
    *("save:tp:D", "local:tp:D", "drain:tp:D", "drained:tp:D"),
    *("shards:fsdp:A", "shards:hsdp:C", "shards:tp:D", "shards:fsdp:B"),
    *("save:tp-only:F", "local:tp-only:F", "drain:tp-only:F", "drained:tp-only:F", "drained:tp-only:E"),
    *("save:ddp:G", "local:ddp:G", "drain:ddp:G", "drained:ddp:G"),
    *("drained:fsdp+meta:A", "local:fsdp+meta:A", "drained:fsdp+reversed:A"),
)
THREE = ("drained:fsdp:A", "shards:fsdp:A", "drained:fsdp:D", "shards:fsdp:D", "drained:ddp:G", "shards:ddp:G")
AGAIN = (
    *("drained:fsdp:A", "drained:tp:D", "drained:fsdp:C", "drained:fsdp:D"),
    *("shards:fsdp:A", "shards:tp:D", "shards:fsdp:C", "shards:fsdp:D"),
    *("drained:tp-only:F", "drained:ddp:G", "drained:fsdp:G", "drained:tp+meta:D", "drained:fsdp+reversed:A"),
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Campaign:
    root = tmp_path_factory.mktemp("fsdp")
    for name in "ABCDEFG":
        (root / name).mkdir()

    def at(*actions: str) -> list[str]:
        return [action[:-1] + str(root / action[-1]) for action in actions]

    return Campaign(
        root,
        two=ranks(root / "two", 2, *at(*TWO)),
        four=ranks(root / "four", 4, *at(*FOUR)),
        three=ranks(root / "three", 3, *at(*THREE)),
        again=ranks(root / "again", 2, *at(*AGAIN)),
    )


# style, place, ranks with different shards, ranks with different statistics
STYLES = [("fsdp", "A", 4, 4), ("hsdp", "C", 2, 4), ("tp", "D", 4, 2), ("tp-only", "F", 4, 1), ("ddp", "G", 1, 4)]


@pytest.mark.parametrize(("style", "where", "parts", "statistics"), STYLES)
def test_four_ranks_save_and_restore_their_own_shards(campaign, style, where, parts, statistics):
    save = campaign.four[FOUR.index(f"save:{style}:{where}")]
    verbs = [f"{verb}:{style}:{where}" for verb in ("local", "drained", "shards")]
    restored = [n for n, action in enumerate(FOUR) if action in verbs]
    assert len(restored) >= 2
    for index in restored:
        for rank in range(4):
            for when in ("at", "later"):  # and two iterations after that
                assert campaign.four[index][rank][when] == save[rank][when]
    placed = set(save[0]["at"]["placed"].values())
    assert any("_StridedShard" in text for text in placed) == (style == "tp")
    assert len({json.dumps(report["at"]["local"]) for report in save}) == parts
    assert len({report["at"]["plain"]["norm.running_mean"] for report in save}) == statistics
    check_extents(w.job(campaign.root / where), 4, {"fsdp": 37, "hsdp": 37, "tp": 37, "tp-only": 13, "ddp": 1}[style])


@pytest.mark.parametrize("where", ["A", "C", "F", "G"])
def test_replicas_are_written_once(campaign, where):
    items = w.drained_items(str(campaign.root / where / "r1"))
    names = [item.name for item in items if item.name.startswith(("optimizer/state/", "average/"))]
    assert len(names) == len(set(names)) > 30
    assert all(item.rank is None for item in items if item.name in names)
    assert {item.rank for item in items} == {None, 0, 1, 2, 3}


@pytest.mark.parametrize("action", ["drained:fsdp+meta:A", "local:fsdp+meta:A", "drained:fsdp+reversed:A"])
def test_models_without_memory_and_optimizers_of_another_order(campaign, action):
    save = campaign.four[FOUR.index("save:fsdp:A")]
    restored = campaign.four[FOUR.index(action)]
    for rank in range(4):
        for when in ("at", "later"):
            assert restored[rank][when] == save[rank][when]


def check_extents(job: str, world: int, count_of_items: int) -> None:
    """The extents of all ranks must cover each global tensor; replicas alone overlap."""
    covered: dict[str, torch.Tensor] = {}
    for rank in range(world):
        for item in ShardManifest.load(paths.manifest(job, 1, rank)).items:
            if item.sharing == "sharded":
                count = covered.setdefault(item.name, torch.zeros(item.global_shape))
                for extent in item.extents:
                    count[tuple(slice(s, s + n) for s, n in zip(extent.start, extent.shape, strict=True))] += 1
                assert sum(torch.Size(e.shape).numel() for e in item.extents) == torch.Size(item.shape).numel()
    assert len(covered) == count_of_items
    for name, count in covered.items():
        assert count.min() == count.max() >= 1, name


@pytest.mark.parametrize("verb", ["drained", "shards"])
@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        ("two", "four", "fsdp:B"),
        ("four", "three", "fsdp:A"),
        ("four", "three", "fsdp:D"),
        ("four", "again", "fsdp:A"),
        ("four", "again", "tp:D"),
        ("four", "again", "fsdp:C"),
        ("four", "again", "fsdp:D"),
    ],
    ids=["2-4", "4-3", "4-3-strided", "4-2", "4-2-tp", "hsdp-fsdp", "tp2-tp1"],
)
def test_another_number_of_ranks(campaign, before, after, action, verb):
    actions = {"two": TWO, "four": FOUR, "three": THREE, "again": AGAIN}
    where = action[-1]
    saved = next(n for n, one in enumerate(actions[before]) if one.startswith("save:") and one.endswith(where))
    save = getattr(campaign, before)[saved]
    restored = getattr(campaign, after)[actions[after].index(f"{verb}:{action}")]
    assert full(restored) == full(save)
    whole = sum(item.nbytes for item in w.drained_items(str(campaign.root / where / "r1")) if item.rank is None)
    for report in restored:  # the generator and the statistics of batch norm come whole
        assert report["wanted"] < 1.5 * whole / len(restored) + 6000


@pytest.mark.parametrize("verb", ["drained", "shards"])
@pytest.mark.parametrize("action", ["fsdp:A", "fsdp:D", "ddp:G"])
def test_statistics_that_differ_between_ranks_stay_those_of_the_rank(campaign, action, verb):
    """Uneven shards, strided ones and replicas of four ranks on three: rank 3's own state is nobody's any more."""
    style = {"A": "fsdp", "D": "tp", "G": "ddp"}[action[-1]]
    save = campaign.four[FOUR.index(f"save:{style}:{action[-1]}")]
    restored = campaign.three[THREE.index(f"{verb}:{action}")]
    for name in ("norm.running_mean", "norm.running_var", "generator"):
        before = [report["at"]["plain"][name] for report in save]
        assert len(set(before)) > 1
        assert [report["at"]["plain"][name] for report in restored] == before[:3]
    assert full(restored) == full(save)  # and the tensor that is given as Sharded


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        ("two", "four", "tp-only:E"),
        ("four", "again", "tp-only:F"),
        ("four", "again", "ddp:G"),
        ("four", "again", "fsdp:G"),
        ("four", "again", "tp+meta:D"),
        ("four", "again", "fsdp+reversed:A"),
    ],
    ids=["tp2-tp4", "tp4-tp2", "ddp-4-2", "ddp-fsdp", "tp2-meta", "reversed"],
)
def test_other_styles_on_another_number_of_ranks(campaign, before, after, action):
    actions = {"two": TWO, "four": FOUR, "again": AGAIN}
    saved = next(n for n, one in enumerate(actions[before]) if one.startswith("save:") and one.endswith(action[-1]))
    restored = getattr(campaign, after)[actions[after].index(f"drained:{action}")]
    assert full(restored) == full(getattr(campaign, before)[saved])


@pytest.mark.parametrize("action", ["save:fsdp:B", "save:tp-only:E"])
def test_a_sharded_checkpoint_goes_into_a_plain_model(campaign, action):
    from fsdp_rank import ROWS, Average, Model, digest, rows

    model, where = Model(), campaign.root / action[-1]
    optimizer = torch.optim.AdamW(model.parameters())
    average = Average(model)
    state = {"model": model, "optimizer": optimizer, "average": average, "generator": torch.Generator()}
    state["table"] = rows(torch.empty(ROWS, 3), 0, 1)
    w.load_drained(str(where / "r1"), state, 0, 1, private="rank_mod")
    want = full(campaign.two[TWO.index(action)])
    assert digest(state["table"].tensor) == want["table"]
    for name, parameter in model.named_parameters():
        assert digest(parameter) == want[name]
        assert digest(average.values[name]) == want[f"average.{name}"]
        for key, value in optimizer.state[parameter].items():
            assert digest(value) == want[f"{name}.{key}"]
    with pytest.raises(StateError, match="another part of the tensor is in the checkpoint"):
        w.load(w.job(where), state)


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_partial_is_refused_by_name(alone):
    from torch.distributed.tensor import DTensor, Partial

    from slurm_resil.ckpt.flatten import flatten

    with pytest.raises(StateError, match=r"a/b: a distributed tensor placed as (Partial|P)"):
        flatten({"a": {"b": DTensor.from_local(torch.ones(2), alone, [Partial()])}})


@pytest.mark.parametrize("size", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_strided_splits_are_torchs_own(size, factor, chunks):
    """Rows of a rank by way of indices equal the rows that torch gives it."""
    from torch.distributed.tensor.placement_types import _StridedShard

    from slurm_resil.ckpt.sharding import _extents, _rows

    whole = torch.arange(size * 3).reshape(size, 3)
    for mine in range(chunks):
        placement = _StridedShard(0, split_factor=factor)
        local = placement._split_tensor(whole, chunks, with_padding=False)[0][mine]
        rebuilt = torch.full_like(local, -1)
        for extent in _extents(_rows((size, 3), [placement], [chunks], [mine])):
            there = tuple(slice(s, s + n) for s, n in zip(extent.start, extent.shape, strict=True))
            here = tuple(slice(s, s + n) for s, n in zip(extent.local, extent.shape, strict=True))
            rebuilt[here] = whole[there]
        assert torch.equal(rebuilt, local)
