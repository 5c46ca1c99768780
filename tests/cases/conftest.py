"""Makes the helpers of other tests importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS / "unit" / "ckpt"), str(_TESTS / "fault")]
