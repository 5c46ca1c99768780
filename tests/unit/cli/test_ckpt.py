"""``ckpt`` as a user calls it, on shards and drained files made by the drain itself."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resil.catalog import RunCatalog
from slurm_resil.core import paths
from slurm_resil.format.manifest import BLOCK_BYTES, DrainedManifest, digest

sys.path.insert(0, str(Path(__file__).parents[1] / "drain"))
sys.path.insert(0, str(Path(__file__).parent))

from command import ckpt
from shardworld import World, build


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two ranks on one node; iteration 10 drained, 20 sealed."""
    made = build(tmp_path, ranks=2, per_node=2)
    made.seal(10, slot=0)
    made.seal(20, slot=1)
    made.drain(iteration=10)
    return made


def test_ls(world):
    done = ckpt("ls", "--json", world=world)
    assert done.returncode == 0, done.stderr
    newest, older = json.loads(done.stdout)["checkpoints"]
    assert (newest["iteration"], newest["state"], newest["local_ranks"]) == (20, "LOCAL", [0, 1])
    assert (older["iteration"], older["state"], older["marked_durable"]) == (10, "DURABLE", True)
    assert older["file"] == "ckpt-0000000010.h5" and older["file_bytes"] > older["local_bytes"] / 2 > 0
    text = ckpt("ls", world=world).stdout
    assert "2 of 2" in text and "ckpt-0000000010.h5" in text and "\x1b" not in text


def test_ls_of_one_tier_and_of_nothing(world, tmp_path):
    done = ckpt("ls", "--json", "--run-dir", world.run_dir)
    assert [one["iteration"] for one in json.loads(done.stdout)["checkpoints"]] == [10]
    done = ckpt("ls", "--run-dir", str(tmp_path / "none"))
    assert (done.returncode, str(tmp_path / "none") in done.stderr) == (78, True)
    (tmp_path / "empty").mkdir()
    done = ckpt("ls", "--run-dir", str(tmp_path / "empty"))
    assert done.returncode == 0 and "no checkpoint in" in done.stdout


def test_ls_finds_its_directories_in_the_environment(world, tmp_path):
    env = {
        "SLURM_RESIL_PREFIX": str(tmp_path / "pfs"),
        "SLURM_RESIL_RUN_ID": "run-7",
        "SLURM_RESIL_BB_ROOT": str(tmp_path / "node0"),
        "SLURM_JOB_ID": "9",
    }
    done = ckpt("ls", "--json", env=env)
    assert [one["iteration"] for one in json.loads(done.stdout)["checkpoints"]] == [20, 10], done.stderr


def test_ls_on_a_terminal_is_a_table(world):
    leader, follower = pty.openpty()
    argv = [sys.executable, "-m", "slurm_resil", "ckpt", "ls", "--run-dir", world.run_dir]
    done = subprocess.run(argv, stdout=follower, timeout=60, env={**os.environ, "COLUMNS": "150", "TERM": "xterm"})
    os.close(follower)
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 0 and "┃" in text and "DURABLE" in text


def test_ls_names_a_drain_that_is_at_work(world):
    for iteration in (10, 20, 40):
        Path(paths.drained_part(world.run_dir, iteration)).touch()
    rows = json.loads(ckpt("ls", "--json", world=world).stdout)["checkpoints"]
    states = {row["iteration"]: row["state"] for row in rows}
    assert states == {10: "DURABLE", 20: "DRAINING", 40: "DRAINING"}


def test_show(world):
    shown = json.loads(ckpt("show", "10", "--json", world=world).stdout)
    items = {(item["name"], item["rank"]): item for item in shown["items"]}
    assert items["model/rows", None]["shape"] == [30, 17] and ("rng/cpu", 1) in items
    assert sum(shown["written_bytes"]) == sum(item["nbytes"] for item in shown["items"])
    local = json.loads(ckpt("show", "20", "--json", world=world).stdout)
    assert {item["rank"] for item in local["items"]} == {0, 1}
    assert "model/rows" in ckpt("show", "10", world=world).stdout
    missing = ckpt("show", "30", world=world)
    assert missing.returncode == 2 and "iteration 30" in missing.stderr


def test_verify_sound(world):
    done = ckpt("verify", "--json", world=world)
    assert done.returncode == 0, done.stderr
    assert [(one["iteration"], one["sound"]) for one in json.loads(done.stdout)["checkpoints"]] == [
        (20, True),
        (10, True),
    ]
    assert "20: sound (ranks [0, 1] here)" in ckpt("verify", "20", world=world).stdout
    assert ckpt("verify", "99", world=world).returncode == 2


def rewritten(world, **changes):
    """Publish another manifest of iteration 10, with a right hash of itself."""
    path = paths.drained_manifest(world.run_dir, 10)
    manifest = dataclasses.replace(DrainedManifest.load(path), **changes)
    manifest.publish(path, sync=False)


def test_verify_deep_compares_with_hdf5s_own_view(world):
    done = ckpt("verify", "10", "--deep", "--json", world=world)
    assert done.returncode == 0 and json.loads(done.stdout)["checkpoints"][0]["deep"] is True, done.stderr
    items = DrainedManifest.load(paths.drained_manifest(world.run_dir, 10)).items
    rows = next(item for item in items if item.name == "model/rows")
    others = tuple(item for item in items if item is not rows)
    for wrong, said in (
        (dataclasses.replace(rows, shape=rows.shape[::-1]), "shape of /state/model/rows is (30, 17)"),
        (dataclasses.replace(rows, offset=others[0].offset), "offset of /state/model/rows is"),
        (dataclasses.replace(rows, name="model/gone"), "/state/model/gone of the manifest is missing"),
    ):
        rewritten(world, items=(*others, wrong))
        assert ckpt("verify", "10", world=world).returncode == 0  # the bytes are what they were
        done = ckpt("verify", "10", "--deep", world=world)
        assert done.returncode == 65 and said in done.stdout, done.stdout


def test_verify_deep_compares_with_the_seals(world):
    """A drained file that was consistently rewritten is not what the ranks have sealed."""
    path = paths.drained(world.run_dir, 10)
    raw = bytearray(Path(path).read_bytes())
    raw[raw.index(world.expected["state/model/same"].tobytes())] ^= 128
    Path(path).write_bytes(raw)
    rewritten(world, blocks=tuple(digest(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)))
    assert ckpt("verify", "10", world=world).returncode == 0
    done = ckpt("verify", "10", "--deep", world=world)
    assert done.returncode == 65 and "state/model/same has the hash" in done.stdout


def test_verify_names_a_flipped_shard(world):
    item = next(i for i in world.manifest(1, 20).items if i.name == "model/rows")
    with open(paths.slot(world.job_dir(0), 1, 1), "r+b") as file:
        file.seek(item.offset)
        byte = file.read(1)[0]
        file.seek(item.offset)
        file.write(bytes([byte ^ 1]))
    done = ckpt("verify", "--json", world=world)
    assert done.returncode == 65 and "iteration 20" in done.stderr
    damaged, sound = json.loads(done.stdout)["checkpoints"]
    assert sound["sound"] and len(damaged["flaws"]) == 1
    assert "of rank 1: the bytes of model/rows do not match" in damaged["flaws"][0]


@pytest.mark.parametrize(("at", "said"), [(0, "torn"), (8, "stale"), (300, "structure"), (4090, "structure")])
def test_verify_sees_damage_around_a_shards_items(world, at, said):
    """The stamp in front, and HDF5's own bytes."""
    with open(paths.slot(world.job_dir(0), 1, 1), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    done = ckpt("verify", "20", "--json", world=world)
    flaws = json.loads(done.stdout)["checkpoints"][0]["flaws"]
    assert (done.returncode, len(flaws)) == (65, 1) and said in flaws[0] and "1-1.h5" in flaws[0]


def test_verify_names_what_lies_in_a_damaged_block(world):
    path = paths.drained(world.run_dir, 10)
    raw = bytearray(Path(path).read_bytes())
    place = raw.index(world.expected["state/model/same"].tobytes())
    raw[place] ^= 128
    Path(path).write_bytes(raw)
    done = ckpt("verify", "10", world=world)
    assert done.returncode == 65 and "block 0 is damaged" in done.stdout and "10: DAMAGED" in done.stdout


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda w: os.truncate(paths.drained(w.run_dir, 10), 100), "is truncated: 100 bytes of"),
        (lambda w: os.unlink(paths.drained(w.run_dir, 10)), "is missing, though"),
        (lambda w: Path(paths.drained_manifest(w.run_dir, 10)).write_text("{}"), "is not a manifest"),
        (lambda w: os.truncate(paths.slot(w.job_dir(0), 0, 0), 4200), "truncated"),
        (lambda w: os.unlink(paths.slot(w.job_dir(0), 0, 0)), "is missing"),
        (lambda w: Path(paths.manifest(w.job_dir(0), 10, 0)).write_text("{"), "not valid JSON"),
    ],
)
def test_verify_any_damage(world, harm, said):
    harm(world)
    done = ckpt("verify", "10", world=world)
    assert done.returncode == 65 and said in done.stdout and "Traceback" not in done.stderr


def test_drain_of_one_node(world):
    done = ckpt("drain", "--json", world=world)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["event"], line["iteration"], line["already"]) == ("drained", 20, False)
    world.check(20)
    again = ckpt("drain", "20", world=world)
    assert again.returncode == 0 and "already=True" in again.stdout
    assert ckpt("drain", "25", world=world).returncode == 75
    assert ckpt("drain", "x", world=world).returncode == 2


def test_fetch_on_one_node(world, tmp_path):
    assert ckpt("drain", "20", world=world).returncode == 0
    other = tmp_path / "other" / "job-3"
    other.parent.mkdir()
    places = ["--run-dir", world.run_dir, "--job-dir", str(other)]
    done = ckpt("fetch", "--json", *places)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["event"], line["iteration"], line["nodes"], line["of"]) == ("fetched", 20, 1, 1)
    whole = Path(paths.drained(world.run_dir, 20)).read_bytes()
    assert Path(paths.staged(str(other), 20)).read_bytes() == whole
    again = ckpt("fetch", "20", "--what", "all", *places)
    assert "0 bytes were read" in again.stdout
    assert ckpt("fetch", "30", *places).returncode == 65
    assert ckpt("fetch", "x", *places).returncode == 2
    nowhere = ckpt("fetch", "--run-dir", world.run_dir, "--job-dir", str(tmp_path / "none" / "job-3"))
    assert nowhere.returncode == 78 and f"the burst buffer {tmp_path / 'none'}" in nowhere.stderr


def test_drain_by_hand_deletes_the_old_one_if_asked_to(world):
    env = {"SLURM_RESIL_KEEP_LAST": "1", "SLURM_RESIL_RUN_ID": "run-7"}
    for arguments, left in ((("--prune",), [10]), ((), [20, 10]), (("--prune",), [20])):
        done = ckpt("drain", "20" if left[0] == 20 else "10", "--json", *arguments, env=env, world=world)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines[-1]["event"] == "drained"
        assert RunCatalog(world.run_dir).durable() == left
    assert {"event": "pruned", "iterations": [10], "left": {}}.items() <= lines[-2].items()
