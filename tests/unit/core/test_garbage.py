from __future__ import annotations

import gc

import pytest

from slurm_resil.core import garbage


def test_no_search_meanwhile_and_again_afterwards():
    assert gc.isenabled()
    with garbage.kept():
        assert not gc.isenabled()
        with garbage.kept():
            pass
        assert not gc.isenabled()  # the outer one goes on
    assert gc.isenabled()


def test_again_after_an_error():
    with pytest.raises(KeyError), garbage.kept():
        raise KeyError
    assert gc.isenabled()


def test_who_has_turned_it_off_keeps_it_off():
    gc.disable()
    try:
        with garbage.kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
