"""Which agents are gone, and how often they are started again. Pure; a part of the policy."""

from __future__ import annotations

from slurm_resil.launch import moves as m


class Agents:
    """See the module.

    Args:
        bound: Restarts of the agent of one node without a new checkpoint in between.

    Attributes:
        lost: Nodes in question, with what was seen.
        absent: Nodes whose agent is known to be gone while the node is there.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.lost: dict[str, str] = {}
        self.absent: set[str] = set()
        self._used: dict[str, tuple[int, int]] = {}  # restarts, and the newest checkpoint at the last one

    def joined(self, node: str) -> None:
        """An agent is there."""
        self.lost.pop(node, None)
        self.absent.discard(node)

    def restart(self, newest: int) -> tuple[list[m.Action], str]:
        """The nodes in question are alive: start their agents again.

        Args:
            newest: Newest checkpoint.

        Returns:
            Actions, and why the ranks cannot go on; empty if they can.
        """
        actions: list[m.Action] = []
        given_up = ""
        for node, why in self.lost.items():
            self.absent.add(node)
            used, at = self._used.get(node, (0, newest))
            used = used if newest == at else 0
            if used >= self._bound:
                given_up = f"the agent of {node} ended {used + 1} times ({why}) although the node is there"
                actions.append(m.Report(event="agent_given_up", fields={"node": node, "why": why}))
            else:
                self._used[node] = (used + 1, newest)
                actions.append(m.Report(event="agent_lost", fields={"node": node, "why": why}))
                actions.append(m.RestartAgent(node=node))
        self.lost = {}
        return actions, given_up

    def complete(self) -> list[m.Action]:
        """Ranks are about to start: every node needs an agent."""
        return [m.RestartAgent(node=node) for node in sorted(self.absent)]
