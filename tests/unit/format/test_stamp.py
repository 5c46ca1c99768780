from __future__ import annotations

import pytest

from slurm_resil.core.errors import DataError
from slurm_resil.core.model import RunInfo
from slurm_resil.format import stamp

RUN = RunInfo(run_id="r", job_id=3, attempt=2, cycle=0, world_size=9, nodes=1)


def test_a_slot_is_complete_only_after_the_end():
    buffer = bytearray(stamp.BYTES)
    made = stamp.make(RUN, generation=77, iteration=5, rank=4)
    stamp.begin(buffer, made)
    read = stamp.read(buffer, where="x")
    assert not read.complete
    assert (read.generation, read.iteration, read.rank, read.world_size, read.job_id, read.attempt) == (
        77,
        5,
        4,
        9,
        3,
        2,
    )
    assert read.run == stamp.run_word("r") != stamp.run_word("s")
    stamp.end(buffer, made)
    assert stamp.read(buffer, where="x").complete
    stamp.begin(buffer, stamp.make(RUN, generation=78, iteration=6, rank=4))
    assert not stamp.read(buffer, where="x").complete


@pytest.mark.parametrize(("data", "fault"), [(b"", "truncated"), (bytes(100), "truncated"), (bytes(512), "torn")])
def test_what_is_no_slot(data, fault):
    with pytest.raises(DataError, match="x is") as caught:
        stamp.read(data, where="x")
    assert caught.value.context["fault"] == fault
