"""Tries settings of the drain on this file system, and says in the words of site.toml which were best.

One setting is tried after the other, each on top of the best so far; a new one is taken only if it is clearly better,
for what is usual has been looked at by more people. Both kinds of checkpoint count: parts that are ranges of the file,
and narrow ones.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slurm_resil.bench.drain import Bench
from slurm_resil.core.config import Drain
from slurm_resil.drain import hints, stripes
from slurm_resil.drain.collective import BUFFER_BYTES
from slurm_resil.launch.commands import site_args

BETTER = 0.95  # of the time of the best so far
_MIB = 1 << 20


@dataclass(frozen=True)
class Try:
    """Settings, and how long a drain of both kinds took with them.

    Attributes:
        drain: As in the site's configuration.
        seconds: Medians, summed up; None: not measured.
    """

    drain: Drain
    seconds: float | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What movers are told."""
        return tuple(site_args(self.drain))

    @property
    def words(self) -> str:
        """Lines of site.toml."""
        lines = ["[drain]"]
        if self.drain.buffer_bytes is not None:
            lines.append(f'buffer = "{self.drain.buffer_bytes // _MIB}MiB"')
        if not self.drain.gather:
            lines.append("gather = false")
        if self.drain.hints:
            lines.append("hints = { " + ", ".join(f'{k} = "{v}"' for k, v in sorted(self.drain.hints.items())) + " }")
        return "\n".join(lines) if len(lines) > 1 else "# nothing of [drain] is better than what holds without it"


@dataclass
class Found:
    """What was found.

    Attributes:
        best: The best.
        usual: Time without any settings, seconds.
        tried: All, in order.
        notes: What could not be tried, and why.
    """

    best: Try
    usual: float
    tried: list[Try] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choices(directory: str, nodes: int) -> tuple[list[list[dict[str, object]]], list[str]]:
    """What to try, a list for each step: changes of buffer, gather and hints; and what is not tried, in words."""
    notes = []
    steps: list[list[dict[str, object]]] = [
        [{"buffer_bytes": size * _MIB} for size in (16, 32, 128) if size * _MIB != BUFFER_BYTES],
        [{"romio_cb_write": "enable"}, {"romio_cb_write": "enable", "gather": False}],
        [{"cb_nodes": str(count)} for count in sorted({1, max(nodes // 2, 1), nodes})],
        [{"cb_buffer_size": str(size * _MIB)} for size in (4, 16, 64)],
        [{"romio_ds_write": mode} for mode in ("enable", "disable")],
    ]
    why = stripes.possible(directory)
    if why:
        notes.append(f"stripes are not tried: {why}")
    else:
        steps.append([{stripes.FACTOR: str(count)} for count in (4, 8, 16)])
        steps.append([{stripes.UNIT: str(size * _MIB)} for size in (1, 4, 16)])
    if hints.file_system(directory) in ("xfs", "gpfs"):
        steps.append([{"direct_write": "true"}])
    else:
        notes.append("direct writes are not tried: MPI has them for xfs and gpfs only")
    return steps, notes


def changed(drain: Drain, change: dict[str, object]) -> Drain:
    """Settings with a change."""
    own = {key: value for key, value in change.items() if key in ("buffer_bytes", "gather")}
    more = {key: str(value) for key, value in change.items() if key not in own}
    return replace(drain, **own, hints={**drain.hints, **more})  # type: ignore[arg-type]  # names of its own fields


def search(
    steps: Sequence[Sequence[dict[str, object]]], measure: Callable[[Drain], float], say: Callable[[Try], None]
) -> Found:
    """Search.

    Args:
        steps: See :func:`choices`.
        measure: How long settings take, seconds.
        say: Hears of each try.
    """
    usual = Try(Drain(), measure(Drain()))
    say(usual)
    found = Found(best=usual, usual=usual.seconds or 0.0, tried=[usual])
    for step in steps:
        base = found.best
        for change in step:
            drain = changed(base.drain, change)
            if any(one.drain == drain for one in found.tried):
                continue
            one = Try(drain, measure(drain))
            say(one)
            found.tried.append(one)
            if (one.seconds or 0.0) < BETTER * (found.best.seconds or 0.0):
                found.best = one
    return found


def tune(
    *,
    size_bytes: int,
    nodes: int = 2,
    repeats: int = 3,
    target: str | None = None,
    settle_s: float = 0.0,
    say: Callable[[Try], None] = lambda _: None,
) -> Found:
    """Try settings with real movers; see :func:`slurm_resil.bench.drain.measure` for the arguments.

    Raises:
        ConfigError: mpiexec is missing.
        ResilError: A mover failed.
    """
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - a fresh directory in it
    with tempfile.TemporaryDirectory(dir=shm) as source, tempfile.TemporaryDirectory(dir=target) as out:
        benches = [
            Bench(
                burst_buffer=os.path.join(source, kind),
                target=os.path.join(out, kind),
                nodes=nodes,
                size_bytes=size_bytes,
                kind=kind,
            )
            for kind in ("rows", "columns")
        ]
        for bench in benches:
            bench.make()

        def once(bench: Bench, drain: Drain) -> Iterator[float]:
            for _ in range(repeats):
                # a directory of its own: stripes are a directory's
                shutil.rmtree(bench.run_dir)
                os.makedirs(bench.run_dir)
                time.sleep(settle_s)
                yield bench.drain(*site_args(drain))["seconds"]

        steps, notes = choices(out, nodes)
        found = search(steps, lambda drain: sum(statistics.median(once(bench, drain)) for bench in benches), say)
    found.notes = notes
    return found
