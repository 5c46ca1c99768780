import itertools
import random

import pytest

from slurm_resil.core import layout
from slurm_resil.core.errors import DataError, UsageError
from slurm_resil.core.layout import Layout
from slurm_resil.launch.layout import assign, rendezvous_port


def test_first_attempt_takes_slurms_order():
    assert assign([], ["n3", "n1", "n2"], 3) == ("n3", "n1", "n2")


def test_r7_a_spare_takes_the_missing_place_and_nobody_moves():
    before = ["n1", "n2", "n3", "n4"]
    # Slurm lists nodes by name, so the spare would be last and every rank behind n2 would shift
    assert assign(before, ["n1", "n3", "n4", "n5"], 4) == ("n1", "n5", "n3", "n4")


def test_r7_places_are_kept_whatever_the_order_and_the_loss():
    rng = random.Random(7)
    before = [f"n{i}" for i in range(8)]
    for _ in range(200):
        lost = set(rng.sample(before, rng.randint(0, 8)))
        now = [node for node in before if node not in lost] + [f"s{i}" for i in range(len(lost))]
        rng.shuffle(now)
        after = assign(before, now, 8)
        assert sorted(after) == sorted(now)
        for place, node in enumerate(before):
            if node not in lost:
                assert after[place] == node


def test_fewer_places_keep_low_places_and_prefer_known_nodes():
    assert assign(["a", "b", "c", "d"], ["z", "d", "b"], 2) == ("d", "b")


def test_more_places_than_before():
    assert assign(["a", "b"], ["c", "b", "a"], 3) == ("a", "b", "c")


def test_left_over_nodes_stay_out():
    assert assign(["a", "b"], ["b", "a", "x"], 2) == ("a", "b")


@pytest.mark.parametrize(("available", "count"), [(["a"], 2), (["a"], 0), (["a", "a"], 1), ([], 1)])
def test_impossible(available, count):
    with pytest.raises(UsageError):
        assign([], available, count)


def test_ranks_follow_places():
    places = Layout(nodes=("n1", "n5", "n3"), ranks_per_node=4)
    assert places.world_size == 12
    assert places.rank("n5", 3) == 7
    with pytest.raises(UsageError, match="n2"):
        places.node_rank("n2")


def test_round_trip(tmp_path):
    assert layout.load(str(tmp_path)) is None
    places = Layout(nodes=("n1", "n5"), ranks_per_node=2)
    layout.save(str(tmp_path), places, 3)
    assert layout.load(str(tmp_path)) == places


@pytest.mark.parametrize("text", ["[]", "{", '{"version":2,"nodes":["a"],"ranks_per_node":1}', '{"version":1}'])
def test_bad_file_is_named_with_a_mend(tmp_path, text):
    (tmp_path / "layout.json").write_text(text)
    with pytest.raises(DataError, match=r"layout\.json"):
        layout.load(str(tmp_path))


def test_ports_differ_between_cycles_attempts_and_neighbouring_jobs():
    seen = {rendezvous_port(*key) for key in itertools.product([70, 71], range(5), range(10))}
    assert len(seen) == 100
    assert min(seen) >= 20_000
    assert max(seen) < 32_000
