"""Bounds and margins of the launcher's policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Bounds and margins.

    Attributes:
        max_restarts: Restarts of the ranks inside an attempt without progress.
        max_idle_attempts: Attempts in a row that gain no iteration before the job is held.
        can_continue: Whether Slurm would requeue the job.
        why_not: Why not.
        margin_s: Time before a deadline at which the requeue is asked for, whatever is not done by then.
        kill_wait_s: Slurm's KillWait: from SIGTERM to SIGKILL.
        leave_s: How long ranks may take to end by themselves once their stop is durable.
        drain_guess_s: Cost of a drain before one was measured.
        drain_tries: Attempts to drain one checkpoint before it is left in the burst buffer.
        order_s: How long a drain may take to hear that it is to go on without a cap, before it is started anew.
        start_s: How long a drain may take until it hears orders.
        encode_guess_s: Cost of an encode before one was measured.
        encode_tries: Attempts to encode one checkpoint.
        encode_limit_s: How long an encode may take at least before it counts as hanging.
        rebuild_limit_s: How long lost shards may be rebuilt before an older checkpoint is taken.
        fetches: Whether the durable checkpoint is staged on the nodes while the ranks start.
        agent_restarts: How often the agent of one node is started again without a new checkpoint.
        unsure_probes: Probes of a node whose slurmd is silent while its agent is heard.
        retry_s: Wait before asking again for a requeue that nobody answered.
        takeover_s: How long the engine may take from accepting the job to killing this attempt.
        prunes: Whether old checkpoints are deleted.
        prune_wait_s: How long the end of the job waits for a deletion.
    """

    max_restarts: int = 3
    max_idle_attempts: int = 3
    can_continue: bool = True
    why_not: str = ""
    margin_s: float = 4.0
    kill_wait_s: float = 30.0
    leave_s: float = 10.0
    drain_guess_s: float = 5.0
    drain_tries: int = 3
    order_s: float = 5.0
    start_s: float = 30.0
    encode_guess_s: float = 2.0
    encode_tries: int = 3
    encode_limit_s: float = 60.0
    rebuild_limit_s: float = 900.0
    fetches: bool = False
    agent_restarts: int = 2
    unsure_probes: int = 6
    retry_s: float = 2.0
    takeover_s: float = 60.0
    prunes: bool = False
    prune_wait_s: float = 30.0
