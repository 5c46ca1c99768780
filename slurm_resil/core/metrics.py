"""What a training says of its state between two saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import SupportsFloat

from slurm_resil.core.errors import UsageError
from slurm_resil.core.retention import METRIC


class Metrics:
    """Numbers by name, for one save."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, values: Mapping[str, SupportsFloat]) -> None:
        """Take values in; the last one of a name holds.

        Raises:
            UsageError: One is no number, or a name is none.
        """
        for name, value in values.items():
            if not METRIC.fullmatch(name):
                raise UsageError(f"metric({name!r}=...) is no name", mend="without spaces and colons, as in loss")
            plain = value.detach() if hasattr(value, "detach") else value  # PyTorch warns of a loss with its graph
            try:
                self._values[name] = float(plain)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"metric({name}={value!r:.100}): a number is needed") from error

    def take(self) -> dict[str, float]:
        """Give those that are finite, and begin anew."""
        values, self._values = self._values, {}
        return {name: value for name, value in values.items() if math.isfinite(value)}
