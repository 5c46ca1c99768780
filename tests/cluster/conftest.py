"""Real Slurm clusters for tests: each starts in a directory of its own and is always ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from looks import look

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the sandboxes of a test that has failed, while they are as they were then."""
    report = yield
    if report.failed:
        values = getattr(item, "funcargs", {}).values()
        found = {id(value): value for value in (getattr(value, "sandbox", value) for value in values)}
        for sandbox in found.values():
            if isinstance(sandbox, Sandbox) and sandbox.layout.info.exists():
                report.sections.append((f"Sandbox {sandbox.spec.dir}", look(sandbox)))
    return report


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
