"""Stripes: set where the file system has them, with a stand-in for ``lfs``, and said in words elsewhere."""

from __future__ import annotations

import os

import pytest

from slurm_resil.core.errors import StorageError
from slurm_resil.drain import hints, stripes


@pytest.fixture
def lustre(tmp_path, monkeypatch):
    """A directory as if on Lustre, and an ``lfs`` that writes down how it was called."""
    lfs = tmp_path / "bin" / "lfs"
    lfs.parent.mkdir()
    lfs.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\ncase "$3" in 999) echo too many >&2; exit 22;; esac\n')
    lfs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lfs.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(hints, "file_system", lambda *_: "lustre")
    return tmp_path


def test_the_directory_gets_what_the_site_says(lustre):
    assert stripes.possible("/scratch") == ""
    stripes.spread("/scratch/run", {"striping_factor": "8", "striping_unit": "4194304", "cb_nodes": "2"})
    assert (lustre / "called").read_text() == "setstripe -c 8 -S 4194304 /scratch/run\n"


def test_nothing_is_called_without_need(lustre):
    stripes.spread("/scratch/run", {"cb_nodes": "2"})
    assert not (lustre / "called").exists()


def test_what_lfs_refuses_is_said(lustre):
    with pytest.raises(StorageError, match="setstripe -c 999 /scratch/run: too many"):
        stripes.spread("/scratch/run", {"striping_factor": "999"})


def test_elsewhere_it_is_said(tmp_path):
    assert "which has no stripes to set" in stripes.possible(str(tmp_path))
    stripes.spread(str(tmp_path), {"striping_factor": "8"})
