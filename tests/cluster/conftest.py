"""Real Slurm clusters for tests: each starts in a directory of its own and is always ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resil.sandbox import Sandbox, SandboxSpec
from slurm_resil.sandbox.teardown import tear_down

ClusterFactory = Callable[..., Sandbox]


def _why_not() -> str:
    if os.geteuid() != 0:
        return "the sandbox's namespaces need root"
    if shutil.which("slurmctld", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None:
        return "Slurm is not installed (apt-get install slurm-wlm munge)"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a cluster where there can be none."""
    why = _why_not()
    for item in items:
        if why and item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def cluster_factory() -> Iterator[ClusterFactory]:
    """Start sandboxes: ``cluster_factory(nodes=4, spares=1)`` takes the fields of ``SandboxSpec``."""
    started: list[Path] = []

    def start(**fields: Any) -> Sandbox:
        path = fields.pop("dir", None) or Path(tempfile.mkdtemp(prefix="srs-"))
        started.append(path)
        return Sandbox.up(SandboxSpec(dir=path, **fields))

    yield start
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others from ending
        for path in started:
            stack.callback(tear_down, path)


@pytest.fixture(scope="module")
def cluster(cluster_factory: ClusterFactory) -> Iterator[Sandbox]:
    """One cluster of four nodes, one of them a spare, for the tests of a module."""
    sandbox = cluster_factory(nodes=4, spares=1, grace_time_s=10)
    yield sandbox
    sandbox.down()
