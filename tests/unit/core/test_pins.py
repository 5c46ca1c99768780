from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from slurm_resil.core import paths, pins


def test_a_pin_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom slurm_resil.core import pins\n"
        f"with pins.hold({str(tmp_path)!r}, 5):\n print('held', flush=True)\n sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pins.exclude(str(tmp_path), 5) as mine:
        assert not mine
    with pins.exclude(str(tmp_path), 6) as mine:
        assert mine
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    with pins.exclude(str(tmp_path), 5) as mine:
        assert mine
    assert list(Path(tmp_path, "pins").iterdir()) == []


def test_holding_while_the_file_goes_away(tmp_path: Path) -> None:
    """Whoever waited on a file that was removed meanwhile holds the new one."""
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with pins.hold(str(tmp_path), 1):
            held.set()
            end.wait(10)

    thread = threading.Thread(target=hold)
    with pins.exclude(str(tmp_path), 1) as mine:
        assert mine
        thread.start()
        assert not held.wait(0.1)
    assert held.wait(10)
    assert Path(paths.pin(str(tmp_path), 1)).exists()
    with pins.exclude(str(tmp_path), 1) as mine:
        assert not mine
    end.set()
    thread.join()
