from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slurm_resil.core import faults


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    faults.load("")


def test_a_point_strikes_at_its_turn() -> None:
    faults.load("a.b:raise@2,c:raise@*")
    faults.point("a.b")
    with pytest.raises(OSError, match=r"injected at a\.b"):
        faults.point("a.b")
    faults.point("a.b")
    for _ in range(3):
        with pytest.raises(OSError, match="injected"):
            faults.point("c")
    faults.point("other")


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", 99)])
def test_a_process_ends_there(action: str, code: int) -> None:
    program = "from slurm_resil.core import faults; faults.point('x'); print('on')"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"SLURM_RESIL_FAULT": f"x:{action}", "PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == code


@pytest.mark.parametrize("text", ["x", "x:", ":kill", "x:explode", "x:kill@often"])
def test_a_slip_in_the_variable_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        faults.load(text)
