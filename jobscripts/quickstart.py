"""Show one training job survive its walltime limit, a preemption and the loss of a node. Called by quickstart.sh."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from story import Job, Reference, Story, StoryError, compare

from slurm_resil.core.errors import ResilError

EVENTS = ("walltime", "preemption", "node_loss")
TRAINING = ("--iterations", "180", "--batch", "2")
PACE = ("--pace", "0.4")


class Quickstart:
    """The story in acts; each fills in ``report`` from what Slurm, the log and the files say."""

    def __init__(self, work: Path, console: Console) -> None:
        self.work, self.console = work, console
        self.began_s = time.monotonic()
        self.table: list[tuple[float, str, str]] = []
        self.report: dict[str, Any] = {
            "survived": dict.fromkeys(EVENTS, False),
            "bit_identical": False,
            "lost_iterations": {},
            "seconds": {},
        }
        self.story: Story | None = None
        self.reference: Reference | None = None

    # -- telling

    def say(self, text: str) -> None:
        """Tell what is being shown and why."""
        self.console.print(f"[cyan]{self.now_s():6.1f} s[/]  {text}")

    def note(self, what: str, where: str) -> None:
        """Put a fact into the table, with the place that it was read from."""
        self.table.append((self.now_s(), what, where))
        self.say(f"[green]{what}[/] [dim]({where})[/]")

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began_s

    # -- acts

    def run(self) -> None:
        """Play all acts."""
        self.reference = Reference(self.work / "reference", TRAINING, nice=5)
        self.say("training without Slurm and without faults in the background, to compare the end with")
        self.say("starting a private Slurm cluster: 4 nodes and a spare, each a slurmd with its own network, hostname,")
        self.say("burst buffer and /dev/shm; two partitions, of which [b]urgent[/] preempts [b]train[/]")
        self.story = story = Story(self.work, nodes=5, spares=1)
        story.start()
        self.report["seconds"]["sandbox"] = round(self.now_s(), 1)
        self.note(f"{story.sandbox.version_text} is up with {', '.join(story.sandbox.nodes)}", "sinfo")
        self.say("submitting [b]train_gpt.sbatch[/] as an ordinary user with a time limit of one minute")
        job = story.submit("main", [*TRAINING, *PACE, "--digest", "digest"], options=["--time=1"])
        story.wait_training(job, starts=1)
        self.note(f"job {job.id} trains on {job.nodes}", "squeue, log")
        self.walltime(story, job)
        self.preemption(story, job)
        self.node_loss(story, job)
        self.say("nothing more happens to it: it trains to the end")
        story.wait_end(job, timeout_s=150)
        self.note(f"job {job.id} completed after {job.restarts} restarts", "scontrol show job")
        self.reference.wait(timeout_s=120)
        different = compare(self.reference.digests, job.directory / "digest")
        self.report["bit_identical"] = not different
        verdict = "the same bits as" if not different else f"{len(different)} parts differ from"
        self.note(f"whole final state of all ranks: {verdict} the undisturbed run", "sha256 of every tensor and value")

    def survived(self, name: str, job: Job, start: int, ok: bool) -> None:
        """Write down how an event ended."""
        self.report["survived"][name] = ok
        self.report["lost_iterations"][name] = job.lost(start)
        self.report["seconds"][name] = round(job.gap_s(start), 1)
        state = f"goes on at iteration {job.starts[start]}, {job.lost(start)} to be trained again"
        self.note(f"{name.replace('_', ' ')}: {state}; {job.gap_s(start):.0f} s without training", "log")

    def walltime(self, story: Story, job: Job) -> None:
        """The limit of the job runs out."""
        self.say(
            "[b]1. walltime[/]: the job needs longer than its minute. It must save in time, come back by itself, go on"
        )
        limit = story.record(job).get("TimeLimit", "")
        story.wait("Slurm to start the job again", lambda: job.restarts == 1, timeout_s=120, job=job)
        self.note(f"requeued before its limit of {limit} killed it", "Restarts=1")
        story.scontrol("update", f"JobId={job.id}", "TimeLimit=30")
        story.wait_training(job, starts=2)
        self.survived("walltime", job, 1, job.starts[1] > 0 and job.restarts == 1)

    def preemption(self, story: Story, job: Job) -> None:
        """A more important job takes the nodes."""
        self.say("[b]2. preemption[/]: somebody else's job in partition urgent wants all four nodes now")
        story.wait_training(job, starts=2, beyond=8)
        urgent_id = int(
            story.sandbox.run(
                [
                    "sbatch",
                    "--parsable",
                    "-p",
                    "urgent",
                    "-N4",
                    "--exclusive",
                    "--time=1",
                    "--output=/dev/null",
                    "--wrap",
                    "sleep 3",
                ],
                user="bob",
            ).stdout.strip()
        )
        urgent = Job(id=urgent_id, directory=self.work, log=Path(os.devnull))
        story.jobs.append(urgent)
        story.wait("the urgent job to run", lambda: urgent.state in ("RUNNING", "COMPLETED"), timeout_s=90)
        nodes = set(story.node_names(urgent.nodes))
        self.note(f"job {urgent.id} got {urgent.nodes}; job {job.id} had to go", "squeue")
        story.wait("the urgent job to end", lambda: urgent.state == "COMPLETED", timeout_s=60)
        story.wait_training(job, starts=3)
        taken = any(nodes & set(story.node_names(names)) for _, state, _, names in job.slurm if names)
        self.survived("preemption", job, 2, taken and job.starts[2] > 0 and job.restarts == 2)
        story.jobs.remove(urgent)

    def node_loss(self, story: Story, job: Job) -> None:
        """A node dies with its burst buffer."""
        self.say(
            "[b]3. loss of a node[/]: everything on one node is killed and its burst buffer is emptied. A spare must"
        )
        self.say("take its place, and that rank's state must come from the shared file system")
        story.wait_training(job, starts=3, beyond=10)
        before = story.node_names(job.nodes)
        batch_host = story.record(job).get("BatchHost", before[0])
        victim = random.Random(time.time_ns()).choice([name for name in before if name != batch_host])
        story.sandbox.node_kill(victim)
        story.sandbox.node_wipe(victim)
        self.note(f"killed {victim} and emptied its burst buffer at iteration {job.iteration}", "this script")
        story.wait_training(job, starts=4)
        after = story.node_names(job.nodes)
        record = story.node(victim)
        self.note(f"{victim} is {record.get('State')}: {record.get('Reason', 'no reason')}", "scontrol show node")
        self.note(f"the job has {', '.join(sorted(set(after) - set(before)))} in its place", "scontrol show job")
        kept = len(set(before) & set(after)) == len(before) - 1 and victim not in after
        self.survived("node_loss", job, 3, kept and "DRAIN" in record.get("State", "") and job.starts[3] > 0)

    # -- end

    def close(self, *, keep: bool) -> None:
        """Take everything down, or say how to."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # enough has been said
        if self.reference is not None:
            self.reference.close()
        if keep and self.story is not None:
            where = self.story.sandbox.layout.dir
            self.console.print(f"kept: slurm-resil sandbox exec --dir {where} -- squeue")
            self.console.print(f"end it with: slurm-resil sandbox down --dir {where} && rm -r {self.work}")
            return
        if self.story is not None:
            self.story.close()
        shutil.rmtree(self.work)

    def show(self) -> None:
        """Print the table."""
        table = Table(title="What happened", title_justify="left")
        table.add_column("at", justify="right")
        table.add_column("what")
        table.add_column("read from", style="dim")
        for at_s, what, where in self.table:
            table.add_row(f"{at_s:.1f} s", what, where)
        self.console.print(table)
        good = all(self.report["survived"].values()) and self.report["bit_identical"]
        self.console.print("[bold green]survived all three[/]" if good else "[bold red]NOT everything survived[/]")


def main() -> int:
    """Play the story; the exit code is 1 unless everything survived."""
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON line on standard output")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    parser.add_argument("--work", type=Path, required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 120)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    quickstart = Quickstart(options.work, console)
    try:
        quickstart.run()
    except (StoryError, ResilError) as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted: taking everything down")
    finally:
        quickstart.close(keep=options.keep)
    quickstart.report["seconds"]["total"] = round(quickstart.now_s(), 1)
    quickstart.show()
    if options.json:
        print(json.dumps(quickstart.report))
    return 0 if all(quickstart.report["survived"].values()) and quickstart.report["bit_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
