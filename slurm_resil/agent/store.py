"""What the agent needs from the burst buffer; whoever starts it brings the real one along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slurm_resil.format.manifest import ShardManifest


class Store(Protocol):
    """The node's sealed shards. Methods may be called from several threads."""

    def sealed(self) -> Mapping[int, Mapping[int, str]]:
        """Paths of the manifests, by iteration and rank."""

    def seal(self, draft: ShardManifest) -> ShardManifest:
        """Hash a written slot and publish its manifest.

        Raises:
            ResilError: It is not what the draft says; nothing is published.
            OSError: The file system refused.
        """

    def prepare(self, rank: int, index: int, slots: int, layout: str) -> bool:
        """Lay out a slot that holds nothing as its rank has published; False if that is another layout by now.

        Raises:
            ResilError: There is no space, or what is published makes no sense.
            OSError: The file system refused.
        """

    def quarantine(self, iteration: int, rank: int, reason: str) -> str | None:
        """Take a shard out of the candidates, and keep it; returns where its manifest is now, None if it is gone."""

    def encoded(self) -> set[int]:
        """Iterations of which this node has its part of the redundancy."""

    def forget(self, iteration: int) -> None:
        """Remove what this node has of the redundancy of an iteration.

        Raises:
            OSError: The file system refused.
        """
