"""Single bits flipped anywhere in a checkpoint: each is reported, and none ever gets into a state."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "ckpt"))
import ckptworld as w

from slurm_resil.ckpt.state import Sharded
from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.drain import check
from slurm_resil.format import frame
from slurm_resil.format import stamp as stamps
from slurm_resil.format.manifest import BLOCK_BYTES, DrainedManifest, Extent, ShardManifest

pytestmark = pytest.mark.torch

FLIPS, LARGE = 2000, 100
Ranges = list[tuple[int, int]]
HASH = re.compile(rb'"[0-9a-f]{32}"')
ATTRIBUTE = re.compile(rb"(dtype|format|version|rank|run_id|iteration|world_size)[\x00-\xff]{64}")


def state_of(rank: int, seed: int, *, large: bool) -> dict[str, Any]:
    extent = Extent(local=(0, 0), start=(3 * rank, 0), shape=(3, 5))
    part = torch.full((3, 5), float(seed)) + torch.arange(15.0).reshape(3, 5)
    if large:
        return {"large": torch.full((BLOCK_BYTES + 999,), seed, dtype=torch.uint8)}
    return {
        **w.training(seed, seed % 2),
        "half": torch.arange(7).bfloat16() * seed,
        "part": Sharded(tensor=part, global_shape=(6, 5), extents=(extent,)),
        "own": torch.full((4,), rank + 10 * seed),
        "ünï": {"small": seed * 1e-7, "name": f"rank {rank} of seed {seed} – é"},
    }


def bits(state: dict[str, Any]) -> object:
    return w.bits({key: value.tensor if isinstance(value, Sharded) else value for key, value in state.items()})


@dataclass
class Kind:
    """Places in a file that are of one kind, and what became of flips there."""

    path: str
    ranges: Ranges
    drained: bool = False
    tried: int = 0
    reported: int = 0
    equal: int = 0
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [stop - start for start, stop in self.ranges]
        assert self.ranges and min(self.sizes) > 0

    def pick(self, rng: random.Random) -> int:
        ((start, stop),) = rng.choices(self.ranges, self.sizes)
        return rng.randrange(start, stop)


def but(ranges: Ranges, holes: Ranges) -> Ranges:
    """What is left of ranges."""
    taken = sorted(holes)
    left = []
    for start, stop in ranges:
        at = start
        for first, last in taken:
            if first < stop and last > at:
                if at < first:
                    left.append((at, first))
                at = max(at, last)
        if at < stop:
            left.append((at, stop))
    return left


class World:
    """Two ranks' shards of one iteration, and the file that they were drained into."""

    def __init__(self, root: Path, *, large: bool) -> None:
        self.large = large
        self.job, self.run = w.job(root), str(root / "r1")
        self.saved = {}
        for rank in (0, 1):
            state = state_of(rank, 5, large=large)
            self.saved[rank] = bits(state)
            w.save_new(self.job, state, rank=rank, world_size=2)
        w.drain(self.job, self.run)
        self.restores: dict[bool, list[Callable[[dict[str, Any]], Any]]] = {
            False: [
                lambda state: w.load(self.job, state),
                lambda state: w.load_shards(self.job, state, 0, 2),
            ],
            True: [lambda state: w.load_drained(self.run, state, 0, 2)],
        }

        self.new_target()

    def new_target(self) -> None:
        self.target = state_of(0, 6, large=self.large)
        self.untouched = bits(self.target)
        assert self.untouched != self.saved[0]

    def kinds(self) -> dict[str, Kind]:
        slot, manifest = paths.slot(self.job, 0, 0), paths.manifest(self.job, 1, 0)
        file, table = paths.drained(self.run, 1), paths.drained_manifest(self.run, 1)
        shard, whole = ShardManifest.load(manifest), DrainedManifest.load(table)
        data = [(item.offset, item.offset + item.nbytes) for item in shard.items if item.offset is not None]
        if self.large:
            return {"data in blocks": Kind(slot, data)}
        around = list(frame.gaps(frame.spans(shard.items), os.path.getsize(slot)))
        raw = Path(slot).read_bytes()
        named = [match.span() for match in ATTRIBUTE.finditer(raw)]
        attributes = but(around, but([(0, len(raw))], named))
        drained = [(item.offset, item.offset + item.nbytes) for item in whole.items if item.offset is not None]
        found = {
            "stamp": Kind(slot, list(stamps.RANGES)),
            "attribute": Kind(slot, attributes),
            "header": Kind(slot, but(around, attributes)),
            "data": Kind(slot, data),
            "drained data": Kind(file, drained, drained=True),
            "drained header": Kind(file, but([(0, whole.file_bytes)], drained), drained=True),
        }
        for name, path in (("", manifest), ("drained ", table)):
            text = Path(path).read_bytes()
            hashes = [match.span() for match in HASH.finditer(text)]
            assert hashes
            found[f"{name}hash table"] = Kind(path, hashes, drained=bool(name))
            found[f"{name}manifest"] = Kind(path, but([(0, len(text))], hashes), drained=bool(name))
        return found

    def flaws(self, *, drained: bool) -> list[str]:
        return check.drained_flaws(self.run, 1) if drained else check.shard_flaws(self.job, 1)

    def same(self, kind: Kind, before: bytes) -> bool:
        """Whether a manifest still says the same: an ``e`` that became an ``E`` in a number, say."""
        if not kind.path.endswith(".json"):
            return False
        type_ = DrainedManifest if kind.drained else ShardManifest
        try:
            return type_.load(kind.path) == type_.from_bytes(before, where="before")
        except DataError:
            return False

    def try_flip(self, kind: Kind, rng: random.Random) -> str:
        """Flip a bit, look, and take it back; says what is wrong with how that was taken."""
        at, bit = kind.pick(rng), rng.randrange(8)
        kind.tried += 1
        before = Path(kind.path).read_bytes() if kind.path.endswith(".json") else b""
        where = f"bit {bit} of byte {at} in {os.path.basename(kind.path)}"
        with flipped(kind.path, at, bit):
            if self.flaws(drained=kind.drained):
                kind.reported += 1
            elif self.same(kind, before):
                kind.equal += 1
            else:
                return f"{where} is not reported"
            for number, restore in enumerate(self.restores[kind.drained]):
                state = self.target
                try:
                    restore(state)
                except DataError:
                    if bits(state) != self.untouched:
                        return f"{where}: restore {number} changed a state and raised"
                else:
                    if bits(state) != self.saved[0]:
                        return f"{where}: restore {number} gave another state"
                    self.new_target()
        return ""


@contextlib.contextmanager
def flipped(path: str, at: int, bit: int) -> Iterator[None]:
    def turn() -> None:
        with open(path, "r+b", buffering=0) as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ (1 << bit)]))

    turn()
    yield
    turn()


@pytest.mark.parametrize(("large", "count"), [(False, FLIPS - LARGE), (True, LARGE)], ids=["every class", "blocks"])
def test_every_flip_is_reported_and_none_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], large: bool, count: int
) -> None:
    world, rng = World(tmp_path, large=large), random.Random(20)
    kinds = world.kinds()
    wrong = []
    for number in range(count):
        name = list(kinds)[number % len(kinds)]
        if fault := world.try_flip(kinds[name], rng):
            wrong.append(f"{name}: {fault}")
    with capsys.disabled():
        print()
        for name, kind in kinds.items():
            print(f"  {name}: {kind.tried} flips, {kind.reported} reported, {kind.equal} that change no value")
    assert wrong == []
    assert sum(kind.tried for kind in kinds.values()) == count
    assert all(kind.reported > 0.95 * kind.tried for kind in kinds.values())
    assert not any(kind.equal for kind in kinds.values() if not kind.path.endswith(".json"))
    for drained in (False, True):  # all are back
        assert world.flaws(drained=drained) == []
        for restore in world.restores[drained]:
            state = state_of(0, 6, large=large)
            restore(state)
            assert bits(state) == world.saved[0]
