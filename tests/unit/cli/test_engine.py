"""``engine run`` where it cannot listen, or has nowhere to write."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_resil.recovery.store import Store


def engine(db: Path, listen: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "slurm_resil", "engine", "run", "--listen", listen, "--db", str(db)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=dict(os.environ))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("listen", "code", "said", "mend"),
    [
        ("ctl", 2, "'ctl' is no HOST:PORT", "write ctl1:7321"),
        ("127.0.0.1:1x", 2, "'127.0.0.1:1x' is no HOST:PORT", "write ctl1:7321"),
        ("127.0.0.1:0", 2, "is no HOST:PORT", "write ctl1:7321"),
        ("0.0.0.0:7000", 78, "every address of this host", "ip -brief address"),
        ("no-such-name.invalid:7000", 78, "nobody knows the name no-such-name.invalid", "ip -brief address"),
        ("203.0.113.7:7000", 78, "that is no address of this host", "ip -brief address"),
    ],
)
def test_an_address_that_cannot_be_listened_on(tmp_path: Path, listen: str, code: int, said: str, mend: str) -> None:
    done = engine(tmp_path / "e.db", listen)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and mend in done.stderr and "Errno" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_somebody_has(tmp_path: Path, taken: int) -> None:
    done = engine(tmp_path / "e.db", f"127.0.0.1:{taken}")
    assert done.returncode == 69
    assert f"cannot listen on 127.0.0.1:{taken}: another process does" in done.stderr
    assert f"ss -ltnp sport = :{taken}" in done.stderr and "Errno" not in done.stderr


def test_a_database_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = engine(tmp_path / "none" / "e.db", "127.0.0.1:7000")
    assert done.returncode == 78
    assert f"{tmp_path / 'none'} does not exist" in done.stderr and "mkdir" in done.stderr


def test_incidents_are_looked_for_where_the_site_says(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'[engine]\ndb = "{tmp_path / "e.db"}"\n')
    argv = [sys.executable, "-m", "slurm_resil", "engine", "incidents"]
    env = {**os.environ, "SLURM_RESIL_SITE": str(site)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2 and f"{tmp_path / 'e.db'} does not exist" in done.stderr
    Store(str(tmp_path / "e.db")).close()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
