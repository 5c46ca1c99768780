"""How the ranks ended: which rank failed first and how, from srun's own words. Pure.

srun reports the end of tasks on its standard error, in the order in which it learns of them; lines of the tasks
themselves carry a label (``-l``) and cannot be taken for srun's. After the first failure the launcher kills the rest,
so only the first line names the culprit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_resil.core.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_NOT_PERMITTED, EXIT_USAGE
from slurm_resil.launch.rank import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND

# exit codes of a rank, or an agent, that would end the same way if it was started again
FINAL = {
    EXIT_USAGE: "usage",
    EXIT_BAD_DATA: "bad data",
    EXIT_NOT_PERMITTED: "not permitted",
    EXIT_CONFIG: "configuration",
    EXIT_NOT_EXECUTABLE: "the command cannot be executed",
    EXIT_NOT_FOUND: "no such command",
}
_ENDED = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+?)\s*$")
_EXIT = re.compile(r"^Exited with exit code (\d+)")
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)")
_LAUNCH = (
    "Unable to create step for job",
    "Unable to confirm allocation",
    "Task launch for",
    "Application launch failed",
    "Unable to contact slurm controller",
)
_SIGNALS = {
    text.split(" (")[0]: number
    for number in signal.valid_signals()
    if (text := signal.strsignal(number) or "") and not text.startswith("Real-time")
}

_KILLING = re.compile(r"srun: (?:error: )?(?:\w+: )?(?:Job step aborted|(?:Force )?Terminat(?:ing|ed) StepId)")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """End of one launch of the ranks.

    Attributes:
        code: Exit code for the job: 0, the rank's own, or 128 + signal.
        task: Slurm's number of the task that failed first, None if unknown.
        rank: Its rank, filled in by whoever knows the layout.
        node: Its node.
        signal: Signal that killed it, None if it exited by itself.
        launch_failed: The ranks never ran: Slurm could not start them.
        words: One sentence for people.
    """

    code: int
    task: int | None = None
    rank: int | None = None
    node: str | None = None
    signal: int | None = None
    launch_failed: bool = False
    words: str = ""

    @property
    def ok(self) -> bool:
        """Whether all ranks ended well."""
        return self.code == 0

    @property
    def final(self) -> str:
        """What a rank's exit code says that no new start mends; empty for all others, and where srun itself failed."""
        return FINAL.get(self.code, "") if self.task is not None and self.signal is None else ""

    @property
    def signature(self) -> tuple[int | None, int]:
        """What makes two failures the same: the rank and the code."""
        return self.rank, self.code


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """One of srun's lines: these tasks of a node ended badly."""

    node: str
    task: int
    code: int
    signal: int | None
    how: str


def parse_line(line: str) -> TaskEnd | None:
    """Read a line of srun's standard error; None if it does not report the end of a task."""
    match = _ENDED.match(line)
    if match is None:
        return None
    how = match["how"]
    task = int(re.split(r"[,\-]", match["tasks"])[0])
    if exited := _EXIT.match(how):
        return TaskEnd(node=match["node"], task=task, code=int(exited[1]), signal=None, how=how)
    if how.startswith("Out Of Memory"):
        return TaskEnd(node=match["node"], task=task, code=128 + signal.SIGKILL, signal=signal.SIGKILL, how=how)
    number = _SIGNALS.get(how.split(" (")[0])
    if number is None:
        return None
    return TaskEnd(node=match["node"], task=task, code=128 + number, signal=int(number), how=how)


def judge(lines: Iterable[str], returncode: int) -> Verdict:
    """Make the verdict of one srun.

    Args:
        lines: srun's own lines of standard error, in order.
        returncode: As from subprocess: negative for a signal that hit srun itself.
    """
    if returncode == 0:
        return Verdict(code=0, words="all ranks ended well")
    code = 128 - returncode if returncode < 0 else returncode
    lines = list(lines)
    if end := _culprit(lines):
        how = f"was killed by {_name(end.signal)}" if end.signal else f"exited with code {end.code}"
        if end.how.startswith("Out Of Memory"):
            how = "was killed: out of memory"
        words = f"task {end.task} on {end.node} {how}"
        return Verdict(code=end.code, task=end.task, node=end.node, signal=end.signal, words=words)
    for line in lines:
        if failure := _NODE_FAILURE.match(line):
            node = failure["node"]
            return Verdict(code=code, node=node, words=f"Slurm reports the failure of node {node}")
    for line in lines:
        if any(text in line for text in _LAUNCH):
            return Verdict(code=code, launch_failed=True, words=line.removeprefix("srun: error: ").strip())
    if returncode < 0:
        return Verdict(code=code, signal=-returncode, words=f"srun was killed by {_name(-returncode)}")
    return Verdict(code=code, words=f"srun ended with code {code}")


def _culprit(lines: Sequence[str]) -> TaskEnd | None:
    """Who began it: what srun reports once it has begun to kill is a consequence.

    Ranks that lose a peer end within the same second, in any order, and with Python's 1: an end of another kind is the
    cause.
    """
    killing = next((i for i, line in enumerate(lines) if _KILLING.match(line)), len(lines))
    before = [end for line in lines[:killing] if (end := parse_line(line))]
    ends = before or [end for line in lines if (end := parse_line(line))]
    return next((end for end in ends if end.code != 1), ends[0] if ends else None)


def _name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
