"""A run on one node starts again with more or fewer ranks: what they restore, from where, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ckptworld as w
import pytest

from slurm_resil.catalog import LocalCatalog
from slurm_resil.core import paths
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch

TRAIN = """
import json, os, sys
import torch
import slurm_resil as sr
from slurm_resil.ckpt.state import Sharded
from slurm_resil.format.manifest import Extent

saves, private = json.loads(sys.argv[1]), sys.argv[2]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rows, columns = 12, 5
step = -(-rows // world)
first, last = min(rank * step, rows), min((rank + 1) * step, rows)
extents = (Extent(local=(0, 0), start=(first, 0), shape=(last - first, columns)),) if last > first else ()
part = Sharded(tensor=torch.zeros(last - first, columns), global_shape=(rows, columns), extents=extents)
place, count = torch.arange(first * columns, last * columns).reshape(-1, columns), torch.zeros(3)
state = {"part": part, "count": count, "seed": torch.full((2,), -1.0)}
with sr.Checkpointer.from_env(state) as ck:
    start = ck.restore(private=private)
    right = bool((part.tensor == (place + 1000 * start if start else 0)).all())
    line = {"rank": rank, "start": start, "right": right, "count": count.tolist(), "seed": state["seed"].tolist()}
    os.write(1, json.dumps(line).encode() + b"\\n")  # in one piece: the ranks write into one pipe
    for number in range(start + 1, start + saves + 1):
        part.tensor.copy_(place + 1000 * number)
        count.fill_(number)
        state["seed"].fill_(rank)
        ck.save(number)
        ck.wait(timeout_s=60)
        ck.step(number)
sys.exit(int(os.environ.get("END", 0)))
"""


def environment(work: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"SLURM_RESIL_BB_ROOT": str(work / "bb"), "SLURM_RESIL_PREFIX": str(work / "pfs")}
    return env | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def train(work: Path, world: int, saves: int, *, private: str = "rank_mod", code: int = 0) -> list[dict[str, Any]]:
    """Run all ranks of a world to the end; returns what they say at the start, by rank."""
    script = work / "train.py"
    script.write_text(TRAIN)
    (work / "bb").mkdir(exist_ok=True)
    env = environment(work)
    env |= {"SLURM_RESIL_RUN_ID": "cases", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(saves), private],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    assert [rank.returncode for rank in ranks] == [code] * world, "".join(errors[-2000:] for _, errors in ends)
    if code:
        return [{"errors": errors} for _, errors in ends]
    return [json.loads(out) for out, _ in ends]


def job_dir(work: Path) -> str:
    (found,) = (work / "bb").glob("job-*")
    return str(found)


def sealed(work: Path) -> dict[int, list[int]]:
    return {at: sorted(by_rank) for at, by_rank in LocalCatalog(job_dir(work), run_id="cases").sealed().items()}


def check(said: Sequence[dict[str, Any]], start: int, *, old: int) -> None:
    for one in said:
        assert (one["start"], one["right"], one["count"]) == (start, True, [float(start)] * 3), one
        assert one["seed"] == [float(one["rank"] % old)] * 2, one


def test_fewer_ranks_go_on_and_nothing_is_left_of_the_others(tmp_path: Path) -> None:
    train(tmp_path, 4, 3)
    assert sealed(tmp_path)[3] == [0, 1, 2, 3]
    check(train(tmp_path, 2, 2), 3, old=4)
    left = sealed(tmp_path)
    assert left[5] == [0, 1]
    assert all(ranks == [0, 1] for ranks in left.values())  # of ranks 2 and 3 there is nothing any more
    assert {name.partition("-")[0] for name in os.listdir(f"{job_dir(tmp_path)}/slots")} == {"0", "1"}


def test_damage_is_found_and_the_iteration_before_is_taken(tmp_path: Path) -> None:
    train(tmp_path, 3, 2)
    job = job_dir(tmp_path)
    manifest = ShardManifest.load(paths.manifest(job, 2, 2))
    part = next(item for item in manifest.items if item.name == "part")
    w.flip(os.path.join(job, "slots", manifest.slot), part.offset)
    check(train(tmp_path, 2, 1), 1, old=3)
    assert len(list(Path(job, "manifests", "lost").glob("0000000002-*.reason"))) == 3
    check(train(tmp_path, 3, 0), 2, old=2)  # what those two have saved, not the three before them


def test_one_shard_is_missing(tmp_path: Path) -> None:
    train(tmp_path, 3, 2)
    os.unlink(paths.manifest(job_dir(tmp_path), 2, 2))
    check(train(tmp_path, 2, 0), 1, old=3)
    os.unlink(paths.manifest(job_dir(tmp_path), 1, 2))
    said = train(tmp_path, 2, 0, code=65)
    assert all("of 3 ranks, these are 2, and they are not all here: iteration" in one["errors"] for one in said)
    assert all("no shard of rank 2" in one["errors"] for one in said)


def test_private_state_is_not_dropped_without_a_word(tmp_path: Path) -> None:
    train(tmp_path, 2, 1)
    said = train(tmp_path, 1, 0, private="error", code=65)
    assert "the number of ranks has changed from 2, and this state is each rank's own: seed" in said[0]["errors"]
    (fresh,) = train(tmp_path, 1, 0, private="fresh")
    assert (fresh["start"], fresh["right"], fresh["seed"]) == (1, True, [-1.0, -1.0])


def test_with_the_launcher(tmp_path: Path) -> None:
    """A run that fails keeps its burst buffer; there is no drained file of what its successor restores."""
    (tmp_path / "bb").mkdir()
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for world, saves, end in ((3, 2, 3), (2, 0, 0)):
        argv = [sys.executable, "-m", "slurm_resil", "run", "--local", "--run-id", "cases", "--max-restarts", "0"]
        argv += [f"--ranks-per-node={world}", "--", sys.executable, str(script), json.dumps(saves), "rank_mod"]
        env = environment(tmp_path) | {"END": str(end)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == end, done.stderr[-3000:]
        for path in (tmp_path / "pfs" / "cases").glob("ckpt-*"):
            path.unlink()
    check([json.loads(line) for line in done.stdout.splitlines() if '"start"' in line], 2, old=3)
