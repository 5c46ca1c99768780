"""What rank and agent tell each other about a slot."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.core import paths
from slurm_resil.core.errors import DataError
from slurm_resil.format import draft
from slurm_resil.format.manifest import Extent, Item, ShardManifest

ITEMS = tuple(
    Item(
        name=f"model/{index}",
        dtype="torch.float32",
        shape=(2, 3),
        offset=4096 * index,
        nbytes=24,
        sharing="sharded",
        global_shape=(4, 3),
        extents=(Extent(local=(0, 0), start=(2, 0), shape=(2, 3)),),
    )
    for index in range(3)
)
SEGMENT = [["weight", {"$": "tensor", "item": "model/0"}], ["empty", []]]
OTHER = [["x", 1]]


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "described").mkdir()
    return str(tmp_path)


def manifest(values: Any) -> ShardManifest:
    return ShardManifest(
        run_id="r", job_id=1, attempt=0, iteration=5, rank=0, world_size=1, node="n", slot="0-1.h5", generation=9,
        items=ITEMS, values=values, costs_s={"copy": 0.5},
    )  # fmt: skip


def test_the_agent_makes_of_it_what_the_rank_has(job: str) -> None:
    values = {"$": "dict", "of": [["model", {"$": "module", "of": SEGMENT}], ["lr", [0.1, None, OTHER]]]}
    whole = manifest(values)
    check = draft.describe(job, "0-1.h5", ITEMS, (SEGMENT, OTHER))
    text = draft.to_wire(whole, check, (SEGMENT, OTHER))
    assert "model/0" not in text
    assert whole.values is values  # it was not changed for that
    heard = draft.read(job, text, "x")
    assert draft.Descriptions(job).complete(heard) == whole
    later = draft.Descriptions(job)  # an agent that was started anew
    assert later.complete(heard) == whole
    os.unlink(paths.described(job, "0-1.h5"))
    assert later.complete(heard) == whole  # it was read once


def test_large_values_go_through_a_file(job: str) -> None:
    values = {"$": "dict", "of": [["order", list(range(1_000_000))]]}
    whole = manifest(values)
    check = draft.describe(job, "0-1.h5", ITEMS, ())
    text = draft.send(job, whole, check, ())
    assert len(text) < 100
    assert draft.Descriptions(job).complete(draft.read(job, text, "x")) == whole
    draft.send(job, ShardManifest(**{**vars(whole), "generation": 10}), check, ())
    with pytest.raises(DataError, match="written again"):
        draft.read(job, text, "x")


def test_a_description_that_is_not_of_this_save_is_noticed(job: str) -> None:
    text = draft.to_wire(manifest(SEGMENT), draft.describe(job, "0-1.h5", ITEMS, (SEGMENT,)), (SEGMENT,))
    found = draft.Descriptions(job)
    found.complete(draft.read(job, text, "x"))
    again = draft.to_wire(manifest(OTHER), draft.describe(job, "0-1.h5", ITEMS[:1], (OTHER,)), (OTHER,))
    assert found.complete(draft.read(job, again, "x")).items == ITEMS[:1]
    for reader in (found, draft.Descriptions(job)):
        with pytest.raises(DataError, match="not of this save") as info:
            reader.complete(draft.read(job, text, "x"))
        assert info.value.context["fault"] == "stale"
    os.unlink(paths.described(job, "0-1.h5"))
    with pytest.raises(DataError, match="missing"):
        draft.Descriptions(job).complete(draft.read(job, text, "x"))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", json.dumps({"slot": "0-1.h5", "description": "x"}), '{"file": "x", "generation": 1}']
)
def test_what_is_no_draft_is_refused(job: str, text: str) -> None:
    with pytest.raises(DataError, match="the draft of rank 3"):
        draft.read(job, text, "the draft of rank 3")
