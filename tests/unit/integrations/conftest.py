"""Makes the helpers of these tests, and of those of the checkpoint engine, importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ckpt")]
