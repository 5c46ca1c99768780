"""Redundancy schemes as people write them: ``single``, ``partner``, ``partner:2``, ``xor``, ``rs``, ``rs:3``."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_resil.core.errors import UsageError

MOST_LOSSES = 16
_DEFAULT = {"single": 0, "partner": 1, "xor": 1, "rs": 2}
_COUNTED = ("partner", "rs")
_MEND = "write single, partner, partner:2, xor, rs or rs:3"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the nodes of a set protect each other.

    Attributes:
        kind: ``single`` (not at all), ``partner`` (whole copies on other nodes), ``xor`` or ``rs`` (Reed-Solomon).
        losses: Nodes that a set may lose.
    """

    kind: str
    losses: int

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read a scheme.

        Raises:
            UsageError: It is none; says what would be one.
        """
        kind, colon, count = text.strip().lower().partition(":")
        if kind not in _DEFAULT:
            raise UsageError(f"{text!r} is no redundancy scheme", mend=_MEND)
        if not colon:
            return cls(kind=kind, losses=_DEFAULT[kind])
        if kind not in _COUNTED:
            raise UsageError(f"{text!r}: {kind} takes no number", mend=_MEND)
        if not (count.isascii() and count.isdigit() and 1 <= int(count) <= MOST_LOSSES):
            raise UsageError(f"{text!r}: the number of losses is not one of 1 to {MOST_LOSSES}", mend=_MEND)
        return cls(kind=kind, losses=int(count))

    @property
    def least_members(self) -> int:
        """Smallest set in which this many losses are covered."""
        return self.losses + 1

    def __str__(self) -> str:
        plain = self.losses == _DEFAULT[self.kind]
        return self.kind if plain else f"{self.kind}:{self.losses}"
