"""What every benchmark prints: one JSON object, or a few lines for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Outcome of a benchmark.

    Attributes:
        bench: Name.
        size_bytes: Bytes that were moved in one repeat; 0 where nothing is moved.
        repeats: Number of repeats behind each figure.
        ratios: Dimensionless: against a reference that was measured in the same run.
        figures: Absolute, with the unit in the name.
    """

    bench: str
    size_bytes: int
    repeats: int
    ratios: Mapping[str, float]
    figures: Mapping[str, float]

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            click.echo(json.dumps({**vars(self), "machine": machine()}))
            return
        for name, value in {**self.figures, **self.ratios}.items():
            click.echo(f"{name:<28} {value:.6g}")


def machine() -> dict[str, object]:
    """Describe this host, as far as it matters for a figure."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
