"""The drain of a job, for people: how far it is, and how it is ended."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from slurm_resil.cli.table import size
from slurm_resil.comm.base import from_os_error
from slurm_resil.core.errors import TryAgainError
from slurm_resil.drain.orders import Orders, withdraw
from slurm_resil.launch import records
from slurm_resil.launch.draining import DrainStatus

SILENT_S = 10.0  # a mover says something about once a second
_POLL_S = 0.2


def known(run_dir: str) -> DrainStatus | None:
    """What the launcher of a run knew last; what an earlier attempt has left behind as running runs no more."""
    status = DrainStatus.read(run_dir)
    if status is not None and status.state == "running" and status.attempt != records.next_number(run_dir) - 1:
        return replace(status, state="interrupted")
    return status


def shown(status: DrainStatus | None, *, running: bool, as_json: bool) -> dict[str, Any] | str | None:
    """What ``job status`` shows.

    Args:
        status: What the launcher knew last.
        running: Whether the job runs: else no drain of it does, whatever the launcher has left behind.
        as_json: For programs: the fields, and ``age_s``, seconds since the launcher has heard of it.
    """
    if status is None:
        return None
    now = time.time()
    state = "interrupted" if status.state == "running" and not running else status.state
    if as_json:
        hangs = {
            node: {"doing": doing, "seconds": round(now - since, 1)} for node, (doing, since) in status.hangs.items()
        }
        return asdict(status) | {"state": state, "hangs": hangs, "age_s": round(now - status.at_s, 1)}
    if state != "running":
        end = f": {status.words}" if status.words else ""
        return f"iteration {status.iteration}: {state}{end}"
    return "; ".join(_words(status, now))


def _words(status: DrainStatus, now: float) -> list[str]:
    percent = 100 * status.done_bytes // max(status.total_bytes, 1)
    words = [f"iteration {status.iteration}: {status.phase or 'starts'}"]
    if status.phase:
        words[0] += f", {percent} % of {size(status.total_bytes)}"
    if status.rate_bytes_s:
        words[0] += f", {size(int(status.rate_bytes_s))}/s"
    if status.left_s is not None:
        words[0] += f", {status.left_s:.0f} s left"
    if status.cap_bytes_s is not None:
        words.append(f"at most {size(int(status.cap_bytes_s))}/s")
    if status.waits:
        words.append(f"waits: {status.waits}")
    for node, (doing, since) in sorted(status.hangs.items()):
        words.append(f"storage hangs on {node} since {now - since:.0f} s ({doing})")
    if status.retry:
        ago, left = now - status.retry["at_s"], status.retry["left_s"]
        words.append(f"{ago:.0f} s ago storage refused ({status.retry['error']}); given up after {left:.0f} s more")
    if status.kept_bytes:
        words.append(f"resumed: {size(status.kept_bytes)} were there already")
    if now - status.at_s > SILENT_S:
        words.append(f"nothing is heard of it since {now - status.at_s:.0f} s")
    return words


def cancel_drain(run_dir: str, *, timeout_s: float) -> DrainStatus:
    """Order the drain that runs to end, and wait until it has.

    Args:
        run_dir: Run's directory.
        timeout_s: Longest wait, seconds.

    Returns:
        How it ended; it may have been done before it heard of this.

    Raises:
        TryAgainError: None runs, or it does not end in time.
        ResilError: The order cannot be written.
    """
    begun = known(run_dir)
    if begun is None or begun.state != "running":
        last = f"; the last one, of iteration {begun.iteration}, is {begun.state}" if begun else ""
        raise TryAgainError(f"no drain runs{last}", mend="look at it with `slurm-resil job status`", path=run_dir)
    orders = Orders(iteration=begun.iteration, cap_bytes_s=begun.cap_bytes_s, cancel=True)
    try:
        orders.write(run_dir)
    except OSError as error:
        raise from_os_error(error, f"writing the order into {run_dir}") from error
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        now = DrainStatus.read(run_dir)
        if now is not None and now.started_s == begun.started_s and now.state != "running":
            withdraw(run_dir)
            return now
        if now is not None and now.started_s != begun.started_s:  # the next one runs already
            before = now.before if now.before.get("started_s") == begun.started_s else {}
            return replace(begun, state=before.get("state", "over"))
        time.sleep(_POLL_S)
    raise TryAgainError(
        f"the drain of iteration {begun.iteration} has not ended in {timeout_s:g} s",
        mend=f"it ends when storage answers; or end its step, resil-drain-{begun.iteration}@ATTEMPT, with scancel",
        path=run_dir,
    )
