"""``ckpt show --tensor`` as a user calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "drain"))
sys.path.insert(0, str(Path(__file__).parent))

from command import ckpt
from shardworld import Local, World, build

from slurm_resil.core import paths


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two ranks; iteration 10 drained, 20 sealed."""
    made = build(tmp_path, ranks=2, per_node=2)
    odd = np.array([[0.1, np.nan, -2.5], [np.inf, 7.0, -np.inf]], np.float32)
    for state in made.states:
        state["odd"] = Local(odd)
        state["count"] = Local(np.array(2**63 + 5, np.uint64))
    made.expected |= {"state/odd": odd, "state/count": made.states[0]["count"].data}
    made.seal(10, slot=0)
    made.seal(20, slot=1)
    made.drain(iteration=10)
    return made


def shown(world: World, *arguments: str, iteration: int = 10) -> dict[str, object]:
    done = ckpt("show", str(iteration), "--tensor", *arguments, "--json", world=world)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_statistics_and_first_values(world):
    got = shown(world, "odd")
    assert (got["shape"], got["dtype"], got["source"]) == ([2, 3], "numpy.<f4", "ckpt-0000000010.h5")
    assert (got["count"], got["nan"], got["infinite"]) == (6, 1, 2)
    assert (got["min"], got["max"]) == (-2.5, 7.0)
    assert got["mean"] == pytest.approx((0.1 - 2.5 + 7.0) / 3)
    assert got["values"] == [pytest.approx(0.1), "nan", -2.5, "inf", 7.0, "-inf"]
    assert shown(world, "count")["max"] == 2**63 + 5  # exact
    assert shown(world, "model/empty")["values"] == []
    text = ckpt("show", "10", "--tensor", "odd", "--values", "2", world=world).stdout
    assert "values       0.1, nan, ..." in text  # in the element's own precision


def test_a_part(world):
    cube = world.expected["state/model/cube"]
    got = shown(world, "model/cube", "--slice", "1:3,-1", "--values", "100")
    expected = cube[1:3, -1]
    assert got["slice_shape"] == list(expected.shape) and got["count"] == expected.size
    assert [str(float(value)) for value in got["values"]] == [str(value) for value in expected.ravel().tolist()]


def test_shards_of_this_node_where_nothing_is_drained_or_when_asked_for(world):
    for arguments, iteration in (((), 20), (("--local",), 10)):
        got = shown(world, "model/rows", "--rank", "1", *arguments, iteration=iteration)
        assert got["shape"] == [15, 17] and got["global_shape"] == [30, 17]
        assert got["extents"] == [{"local": [0, 0], "start": [15, 0], "shape": [15, 17]}]
        assert "1-" in str(got["source"])


def test_the_values_of_a_rank_are_text(world):
    assert json.loads(str(shown(world, "values", "--rank", "1")["text"])) == {"iteration": 10, "lr": 0.5, "rank": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model/ros",), "is one of these meant: model/rows"),
        (("rng/cpu",), "ranks 0, 1 each have a 'rng/cpu' of their own; say which with --rank"),
        (("rng/cpu", "--rank", "7"), "of rank 7"),
        (("odd", "--slice", "5"), "the shape is (2, 3)"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(world, arguments, words):
    done = ckpt("show", "10", "--tensor", *arguments, world=world)
    assert done.returncode == 2 and words in done.stderr


def test_a_damaged_tensor_is_not_shown(world):
    with open(paths.drained(world.run_dir, 10), "r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)[0]
        file.seek(-3, 2)
        file.write(bytes([byte ^ 1]))
    done = ckpt("show", "10", "--tensor", "odd", "--json", world=world)
    assert done.returncode == 65 and "is damaged" in done.stderr and "values" not in done.stdout


def test_it_needs_no_torch(world):
    import subprocess

    code = "import sys; sys.modules['torch'] = None; from slurm_resil.cli.main import main; sys.argv[0] = 'x'; main()"
    argv = [sys.executable, "-c", code, "ckpt", "show", "10", "--tensor", "odd", "--run-dir", world.run_dir]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "numpy.<f4" in done.stdout, done.stderr
