"""What the launcher plans for the protection of a job: sets from settings, the site's groups, the attempt before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_resil.core import config, paths
from slurm_resil.core.layout import Layout
from slurm_resil.core.settings import Settings
from slurm_resil.launch import protect

NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def site(tmp_path):
    groups = tmp_path / "groups.toml"
    groups.write_text('[rack]\nr1 = "n[1-2],n9"\nr2 = "n[3-4]"\n')
    path = tmp_path / "site.toml"
    path.write_text(f'[redundancy]\nfailure_groups = ["file:{groups}"]\n')
    return str(path)


def planned(site: str, run_dir: Path, nodes: tuple[str, ...] = NODES, **env: str) -> protect.Protected:
    env = {"SLURM_RESIL_SITE": site, **{f"SLURM_RESIL_{name}": value for name, value in env.items()}}
    held = Settings.from_env(env, config.load(env))
    return protect.plan(held, env, Layout(nodes=nodes, ranks_per_node=2), str(run_dir), local=False)


def written(run_dir: Path) -> list[list[str]]:
    return json.loads(Path(paths.sets(str(run_dir))).read_text())["sets"]


def test_nothing_is_protected_unless_it_is_asked_for(site, tmp_path):
    made = planned(site, tmp_path)
    assert (made.chosen.protects, made.sets, made.warnings) == (False, (), ())
    assert not Path(paths.sets(str(tmp_path))).exists()


def test_sets_go_across_racks_and_stay_when_a_node_is_replaced(site, tmp_path):
    made = planned(site, tmp_path, REDUNDANCY="xor", SET_SIZE="2")
    assert made.warnings == ()
    assert sorted(node for one in made.sets for node in one) == list(NODES)
    assert all({node in ("n1", "n2") for node in one} == {True, False} for one in made.sets)
    assert written(tmp_path) == [list(one) for one in made.sets]
    (mate,) = {node for one in made.sets if "n2" in one for node in one} - {"n2"}
    again = planned(site, tmp_path, ("n1", "n9", "n3", "n4"), REDUNDANCY="xor", SET_SIZE="2")
    assert any(set(one) == {"n9", mate} for one in again.sets)  # a spare takes the place, the others stay


def test_racks_that_are_too_few_are_told(site, tmp_path):
    made = planned(site, tmp_path, REDUNDANCY="xor", SET_SIZE="4")
    assert any("rack" in words for words in made.warnings)


def test_one_node_has_nobody_and_that_is_told_to_who_asked(site, tmp_path):
    asked = planned(site, tmp_path, ("n1",), REDUNDANCY="xor")
    assert not asked.chosen.protects
    assert any("one node" in words for words in asked.warnings)
    assert planned(site, tmp_path, ("n1",), REDUNDANCY="auto").warnings == ()


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', '{"sets": 3}', '{"sets": [[1]]}', "[]"])
def test_a_damaged_file_of_sets_is_made_anew(site, tmp_path, text):
    Path(paths.sets(str(tmp_path))).write_text(text)
    made = planned(site, tmp_path, REDUNDANCY="partner")
    assert written(tmp_path) == [list(one) for one in made.sets]


def test_groups_that_cannot_be_read_are_told_and_do_not_stop_the_job(site, tmp_path):
    (tmp_path / "groups.toml").unlink()
    made = planned(site, tmp_path, REDUNDANCY="xor")
    assert made.chosen.protects
    assert any("groups.toml" in words for words in made.warnings)
