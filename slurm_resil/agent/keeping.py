"""Which iterations must not be overwritten on this node: pure.

A restore needs the newest iteration that all ranks have sealed, and after the loss of a node the newest one that is
protected. Both rules hold over all nodes: what one node gives away is lost for all. So they go by what the leader has
told everybody, and by what lies on this node: a node that has its part of the redundancy of an iteration cannot know
whether the others have theirs, and keeps the shards until it hears what has become of it.
"""

from __future__ import annotations

from collections.abc import Collection

KEEP = 64  # iterations of which it is known that they will not be protected


class Keeping:
    """See the module.

    Attributes:
        sealed_all: Newest iteration that all ranks have sealed.
        restored: Iteration that training went on from.
        protected: Newest iteration with redundancy.
        durable: Newest durable iteration.
        given_up: Iterations that will never be sealed by all.
    """

    def __init__(self) -> None:
        self.sealed_all = self.restored = self.protected = self.durable = 0
        self.given_up: set[int] = set()
        self._unprotected: set[int] = set()

    def begin(self) -> None:
        """Begin a cycle: nothing may be overwritten before its plan is known."""
        self.sealed_all = self.restored = self.protected = self.durable = 0
        self.given_up.clear()
        self._unprotected.clear()

    def plan(self, iteration: int, protected: int, durable: int, encoded: Collection[int]) -> None:
        """Hear what is restored, and which of it is how safe.

        Args:
            iteration: What is restored.
            protected: Newest iteration up to that one with redundancy on all nodes.
            durable: Newest durable iteration up to that one.
            encoded: Iterations of which this node has its part of the redundancy. Older ones that are not protected
                were left by an encode that did not come to its end.
        """
        self.protected, self.durable = protected, durable
        self._unprotected = {one for one in encoded if one < iteration and one != protected}

    def all_sealed(self, iteration: int) -> None:
        """Hear that all ranks have sealed an iteration."""
        self.sealed_all = max(self.sealed_all, iteration)
        self.given_up = {one for one in self.given_up if one > iteration}

    def is_protected(self, iteration: int) -> None:
        """Hear that every node has its part of the redundancy of an iteration."""
        self.protected = max(self.protected, iteration)
        self._unprotected = {one for one in self._unprotected if one > iteration}

    def is_unprotected(self, iteration: int) -> None:
        """Hear that an iteration will not be protected."""
        self._unprotected.add(iteration)
        self._unprotected = set(sorted(self._unprotected)[-KEEP:])

    def is_durable(self, iteration: int) -> None:
        """Hear that an iteration is durable."""
        self.durable = max(self.durable, iteration)

    def expendable(self, iteration: int, encoded: Collection[int], *, tight: bool = False) -> bool:
        """Whether a shard may be overwritten.

        Args:
            iteration: Its iteration.
            encoded: Iterations of which this node has its part of the redundancy.
            tight: There is no third slot, and no other one is to be had: with one that holds the protected iteration
                and one that holds the newest complete one nothing could be saved any more. If that newest one will not
                be protected, the protected one goes.
        """
        if iteration in self.given_up:
            return True
        if iteration >= max(self.sealed_all, self.restored):
            return False
        if iteration > max(self.protected, self.durable):
            return iteration not in encoded or iteration in self._unprotected
        if iteration < self.protected or iteration <= self.durable:
            return True
        return tight and self.sealed_all in self._unprotected

    def words(self) -> str:
        """What is kept, for a message."""
        words = f"all ranks have sealed {self.sealed_all}"
        if self.protected > self.durable:
            words += f", {self.protected} is the newest that is protected"
        return words
