"""The tutorial's program on real ranks over gloo: FSDP2, HSDP, tensor parallelism, other world sizes, async saves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_resil.ckpt import saved

pytestmark = pytest.mark.torch

RANK = str(Path(__file__).parent / "dcp_rank.py")


def ranks(directory: Path, world: int, *actions: str) -> dict[str, list[dict]]:
    """Run all ranks; returns their reports by action."""
    directory.mkdir()
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = []
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(directory / f"log-{rank}", "w+")) for rank in range(world)]
        try:
            for rank, log in enumerate(logs):
                argv = [sys.executable, "-W", "ignore", RANK, str(rank), str(world), str(directory), *actions]
                started.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log))
            codes = [process.wait(timeout=120) for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    text = "".join((directory / f"log-{rank}").read_text()[-3000:] for rank in range(world))
    assert codes == [0] * world, text
    return {
        action.rsplit("/", 1)[0].rsplit(":", 1)[0] + ":" + action[-1]: [
            json.loads((directory / f"{index}-{rank}.json").read_text()) for rank in range(world)
        ]
        for index, action in enumerate(actions)
    }


@dataclass(frozen=True)
class Campaign:
    root: Path
    two: dict[str, list[dict]]
    four: dict[str, list[dict]]
    three: dict[str, list[dict]]


TWO = (
    *("thread:fsdp:E", "load:fsdp:E", "process:fsdp:F", "load:fsdp:F", "caching:fsdp:G", "load:fsdp:G"),
    *("save:fsdp:B", "fails:fsdp:B", "full:fsdp:B", "load:fsdp:B"),
    "strided:none:H",
)
FOUR = (
    *("load:fsdp:B", "save:fsdp:A", "load:fsdp:A", "save:hsdp:C", "load:hsdp:C", "save:tp:D", "load:tp:D"),
    *("load:fsdp:D", "load:tp:A"),
)
THREE = ("load:fsdp:A", "load:fsdp:D", "load:fsdp:C")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    root = tmp_path_factory.mktemp("dcp")

    def at(*actions: str) -> list[str]:
        return [action[:-1] + str(root / action[-1]) for action in actions]

    return Campaign(
        root,
        two=ranks(root / "two", 2, *at(*TWO)),
        four=ranks(root / "four", 4, *at(*FOUR)),
        three=ranks(root / "three", 3, *at(*THREE)),
    )


@pytest.mark.parametrize(("style", "where"), [("fsdp", "A"), ("hsdp", "C"), ("tp", "D")])
def test_the_same_ranks_get_their_parts_back(campaign: Campaign, style: str, where: str) -> None:
    save, load = campaign.four[f"save:{style}:{where}"], campaign.four[f"load:{style}:{where}"]
    for rank in range(4):
        for what in ("local", "full", "placed"):
            assert load[rank]["at"][what] == save[rank]["at"][what]
        assert load[rank]["epoch"] == 7
    assert any("_StridedShard" in text for text in save[0]["at"]["placed"].values()) == (style == "tp")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("two", "save:fsdp:B"), ("four", "load:fsdp:B")),
        (("four", "save:fsdp:A"), ("three", "load:fsdp:A")),
        (("four", "save:fsdp:A"), ("four", "load:tp:A")),
        (("four", "save:tp:D"), ("four", "load:fsdp:D")),
        (("four", "save:tp:D"), ("three", "load:fsdp:D")),
        (("four", "save:hsdp:C"), ("three", "load:fsdp:C")),
    ],
    ids=["2-4", "4-3", "fsdp-tp", "tp-fsdp", "tp-3", "hsdp-3"],
)
def test_another_world_or_sharding(campaign: Campaign, before: tuple[str, str], after: tuple[str, str]) -> None:
    save, load = (getattr(campaign, group)[action] for group, action in (before, after))
    assert len(save[0]["at"]["full"]) > 20
    for report in load:
        assert report["at"]["full"] == save[0]["at"]["full"]


@pytest.mark.parametrize(("verb", "where"), [("thread", "E"), ("process", "F"), ("caching", "G")])
def test_async_saves_and_cached_plans(campaign: Campaign, verb: str, where: str) -> None:
    """A cached plan must write the second save's weights, into the second save."""
    save, load = campaign.two[f"{verb}:fsdp:{where}"], campaign.two[f"load:fsdp:{where}"]
    assert all(report["at"]["full"] == save[0]["at"]["full"] for report in load)
    assert [one.complete for one in saved.found(str(campaign.root / where))] == [True]


def test_an_error_of_one_rank_reaches_all_and_the_checkpoint_before_stands(campaign: Campaign) -> None:
    for report in campaign.two["fails:fsdp:B"]:
        assert "RANK 1" in report["error"]
        assert "odd-1: a builtins:object cannot be stored" in report["error"]
    for report in campaign.two["full:fsdp:B"]:
        assert "RANK 1" in report["error"]
        assert "did not fit" in report["error"]
    save, load = campaign.two["save:fsdp:B"], campaign.two["load:fsdp:B"]
    assert load[0]["at"]["full"] == load[1]["at"]["full"] == save[0]["at"]["full"]


def test_parts_of_several_boxes_are_read_right_and_never_saved_wrong(campaign: Campaign) -> None:
    for report in campaign.two["strided:none:H"]:
        assert report["right"]
        assert "overlapping chunks" in report["error"]  # torch's plan is refused by torch itself


def test_there_is_no_pickle_in_any_file(campaign: Campaign) -> None:
    files = [path for path in campaign.root.glob("[A-G]/**/*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        data = path.read_bytes()
        assert path.suffix in (".h5", ".json"), path
        assert not data.startswith((b"PK", b"\x80")), path
        assert b"torch._utils" not in data, path
        assert b"ctorch" not in data, path
