from __future__ import annotations

from pathlib import Path

from slurm_resil.core import control as c


def test_a_page_is_occupied_while_a_rank_trains_by_it(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    page = c.ControlPage.create(path, 2)
    looker = c.ControlPage.open(path)
    assert not page.occupied
    ranks = [c.ControlPage.open(path, occupy=True) for _ in range(2)]
    assert page.occupied
    ranks[0].close()
    assert page.occupied
    ranks[1].close()
    assert not page.occupied
    looker.close()
    page.close()


def test_a_fresh_page_does_not_disturb_who_has_the_old_one(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    old = c.ControlPage.create(path, 1)
    old.words[c.EPOCH] = 7
    new = c.ControlPage.create(path, 1)
    assert (old.words[c.EPOCH], new.words[c.EPOCH]) == (7, 0)
    assert c.ControlPage.open(path).words[c.EPOCH] == 0


def test_blocks_do_not_share_cache_lines(tmp_path: Path) -> None:
    page = c.ControlPage.create(str(tmp_path / "control"), 3)
    starts = [page.block(local) * c.WORD_BYTES for local in range(3)]
    assert all(start % 64 == 0 for start in starts)
    assert len({start // 64 for start in starts} | {0}) == 4
