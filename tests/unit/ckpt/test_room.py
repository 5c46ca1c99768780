"""A burst buffer with more and less room beside parity: what a rank is told, and how many slots it has."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import ckptworld as w
import pytest
import torch

from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.ckpt.store import SlotStore
from slurm_resil.core import sets
from slurm_resil.core.errors import CapacityError, SpaceError
from slurm_resil.core.schemes import Scheme

pytestmark = pytest.mark.torch
MIB = 1 << 20
STATE = MIB - (96 << 10)  # a slot of this is less than 1 MiB


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Makes a burst buffer of so many MiB; returns the job's directory in it."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "bb"
    place.mkdir()

    def mount(mib: int) -> str:
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)]
        subprocess.run([shutil.which("mount") or "/bin/mount", *options], check=True)
        return str(place / "job-7")

    yield mount
    subprocess.run([shutil.which("umount") or "/bin/umount", str(place)], check=True)


def store(job: str, run_dir: Path) -> SlotStore:
    def unused(*_: object) -> object:
        raise AssertionError

    run_dir.mkdir(exist_ok=True)
    return SlotStore(
        {"w": torch.zeros(STATE, dtype=torch.uint8)},
        job_dir=job,
        run_dir=str(run_dir),
        info=w.run_info(),
        rank=0,
        node="n0",
        ranks_on_node=1,
        slots=4,
        private="error",
        options=LoadOptions(),
        helpers=(),
        shard=unused,  # type: ignore[arg-type]
        shards=unused,  # type: ignore[arg-type]
        drained=unused,  # type: ignore[arg-type]
    )


def slots_of(made: SlotStore) -> int:
    """How many slots there is room for."""
    for index in range(4):
        try:
            made.take((index,))
        except SpaceError:
            return index
    return 4


@pytest.mark.parametrize(
    ("mib", "slots", "words"),
    [
        (9, 4, ""),  # 4 slots, and the parity of 3 checkpoints
        (6, 3, "3 slots are made"),
        (4, 4, "checkpoints are not protected: 2 slots leave"),  # nothing is kept free for what does not fit
    ],
)
def test_parity_of_two_nodes(mounted, tmp_path, caplog, mib, slots, words):
    job, run_dir = mounted(mib), tmp_path / "run"
    run_dir.mkdir()
    sets.save(str(run_dir), [["n0", "n1"]], Scheme.parse("xor"))
    with caplog.at_level(logging.WARNING):
        made = store(job, run_dir)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(words)
    if words:
        assert words in told[0] and f"holds {mib * MIB} bytes" in told[0] and "xor in sets of 2 nodes" in told[0]
    assert slots_of(made) == slots
    made.close()


def test_without_protection_all_is_for_slots(mounted, tmp_path, caplog):
    made = store(mounted(4), tmp_path / "run")
    assert slots_of(made) == 4 and not caplog.records
    made.close()


def test_two_slots_are_needed_all_the_same(mounted, tmp_path):
    with pytest.raises(CapacityError, match="are needed for 2 slots of 1 ranks"):
        store(mounted(1), tmp_path / "run")
