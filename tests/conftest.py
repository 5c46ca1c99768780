"""What all tests share: the example's helpers and the harness are importable by name."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness import References

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT / "jobscripts"), str(_ROOT / "tests" / "cluster")]


def pytest_configure() -> None:
    """End in order on SIGTERM too: what the fixtures have started is taken down."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # run.sh starts us in the background, where it is ignored


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """Undisturbed runs of the training example, each trained once for all tests."""
    from harness import References

    made = References(tmp_path_factory.mktemp("references"))
    yield made
    made.close()
