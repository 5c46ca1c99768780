"""Which member of a set gives what to whom: pure.

Every scheme is the same thing. A member's package is cut into chunks, one for each of the stripes that it contributes
to; the holders of a stripe keep one parity each. There are as many stripes as members, and they are turned round the
set, so that all contribute and hold alike:

- ``partner``: member s alone contributes to stripe s, and the next ones hold a copy each.
- ``xor`` and ``rs``: members s, s + 1... hold the parities of stripe s, all others contribute to it.

A set of n members that covers n - 1 losses has one contributor for each stripe: parities are copies then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurm_resil.core.schemes import Scheme
from slurm_resil.redundancy import gf


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A set of ``members`` nodes under a scheme.

    Attributes:
        kind: ``partner``, ``xor`` or ``rs``.
        members: Nodes of the set, 2 at least.
        losses: Nodes that it may lose, at most one less than the members.
    """

    kind: str
    members: int
    losses: int

    @classmethod
    def of(cls, scheme: Scheme, members: int) -> Geometry:
        """Geometry of a set; one that is too small for the scheme covers fewer losses."""
        return cls(kind=scheme.kind, members=members, losses=min(scheme.losses, members - 1))

    def __post_init__(self) -> None:
        if not 1 <= self.losses < self.members <= gf.MOST_COLUMNS or self.kind not in ("partner", "xor", "rs"):
            raise ValueError(f"no set: {self}")

    @property
    def chunks(self) -> int:
        """Pieces of each package; the number of contributors to a stripe."""
        return 1 if self.kind == "partner" else self.members - self.losses

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Members that hold the parities of a stripe, by row."""
        first = stripe + 1 if self.kind == "partner" else stripe
        return tuple((first + row) % self.members for row in range(self.losses))

    def contributors(self, stripe: int) -> tuple[int, ...]:
        """Members that contribute to a stripe, by column: the one in column c gives its chunk c."""
        first = stripe if self.kind == "partner" else stripe + self.losses
        return tuple((first + column) % self.members for column in range(self.chunks))

    def held(self, member: int) -> tuple[tuple[int, int], ...]:
        """(stripe, row) of the parities that a member holds, by row."""
        first = member - 1 if self.kind == "partner" else member
        return tuple(((first - row) % self.members, row) for row in range(self.losses))

    def chunk(self, nbytes: int, column: int) -> tuple[int, int]:
        """First byte of a chunk of a package, and the byte after its last."""
        size = -(-nbytes // self.chunks)
        return min(column * size, nbytes), min((column + 1) * size, nbytes)

    def parity_bytes(self, packages: Mapping[int, int], stripe: int) -> int:
        """Size of each parity of a stripe, given the sizes of the members' packages: that of its largest chunk."""
        sizes = (self.chunk(packages[m], c) for c, m in enumerate(self.contributors(stripe)))
        return max(stop - start for start, stop in sizes)

    def coefficients(self) -> tuple[tuple[int, ...], ...]:
        """Matrix of the code: rows are parities, columns contributors."""
        return gf.matrix(self.losses, self.chunks)

    def recover(self, stripe: int, missing: Collection[int], parities: Collection[int]) -> dict[int, Recipe] | None:
        """How to have chunks back.

        Args:
            stripe: Stripe.
            missing: Columns whose chunks are lost.
            parities: Rows whose parities are there.

        Returns:
            By column what its chunk is the sum of; None if it cannot be had.
        """
        lost, rows = sorted(missing), sorted(parities)[: len(missing)]
        if len(rows) < len(lost):
            return None
        code = self.coefficients()
        solved = gf.inverse([[code[row][column] for column in lost] for row in rows])
        recipes = {}
        for column, weights in zip(lost, solved, strict=True):
            chunks: dict[int, int] = {}
            for other in range(self.chunks):
                if other not in missing:
                    value = 0
                    for weight, row in zip(weights, rows, strict=True):
                        value ^= gf.multiply(weight, code[row][other])
                    chunks[other] = value
            recipes[column] = Recipe(
                chunks={one: value for one, value in chunks.items() if value},
                parities={row: weight for row, weight in zip(rows, weights, strict=True) if weight},
            )
        return recipes


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A chunk as a sum: coefficients of other chunks of its stripe by column, and of parities by row."""

    chunks: Mapping[int, int]
    parities: Mapping[int, int]
