"""Measured times of saves and drains, kept over attempts: what a checkpoint before a deadline will cost.

File ``costs.json`` in the run's directory: ``{"version": 1, "samples": {"copy": [0.21, ...], ...}}``, the newest
samples last. Names: ``copy`` (tensors into the slot), ``seal`` (hash and publish), ``save`` (from a proposal until all
ranks have sealed), ``encode`` (redundancy on other nodes), ``drain`` (burst buffer to the parallel file system,
verified). All in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from slurm_resil.core import fsio, paths
from slurm_resil.core.errors import DataError

VERSION = 1
KEEP = 200  # samples of each kind


class Costs:
    """Samples by name; not safe for use by several threads."""

    def __init__(self, samples: Mapping[str, Iterable[float]] | None = None) -> None:
        self._samples = {name: list(values)[-KEEP:] for name, values in (samples or {}).items()}

    @classmethod
    def load(cls, run_dir: str) -> Costs:
        """Read what earlier attempts measured; empty if there is nothing or it cannot be read: it is a help only."""
        try:
            raw = fsio.read_json(paths.costs(run_dir))
            if raw["version"] != VERSION:
                return cls()
            samples = {str(name): [float(value) for value in values] for name, values in raw["samples"].items()}
        except (OSError, DataError, KeyError, TypeError, ValueError, AttributeError):
            return cls()
        return cls(
            {name: [v for v in values if math.isfinite(v) and v >= 0] for name, values in samples.items()},
        )

    def save(self, run_dir: str) -> None:
        """Publish.

        Raises:
            OSError: The file system refused.
        """
        rounded = {name: [round(value, 4) for value in values] for name, values in self._samples.items()}
        fsio.write_json(paths.costs(run_dir), {"version": VERSION, "samples": rounded})

    def add(self, name: str, seconds: float) -> None:
        """Add a sample; the oldest beyond ``KEEP`` is forgotten."""
        if math.isfinite(seconds) and seconds >= 0:
            values = self._samples.setdefault(name, [])
            values.append(seconds)
            del values[:-KEEP]

    def quantile(self, name: str, q: float) -> float | None:
        """Smallest sample that at least the fraction ``q`` of the samples does not exceed; None without samples."""
        values = sorted(self._samples.get(name, ()))
        return values[max(0, math.ceil(q * len(values)) - 1)] if values else None

    def p99(self, name: str) -> float | None:
        """99th percentile, seconds; None without samples. With fewer than 100 samples this is the largest."""
        return self.quantile(name, 0.99)

    def count(self, name: str) -> int:
        """Number of samples kept."""
        return len(self._samples.get(name, ()))
