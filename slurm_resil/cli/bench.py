"""``slurm-resil bench``: measurements on this system."""

from __future__ import annotations

import json

import click


@click.group()
def bench() -> None:
    """Measure on this system; ratios are against the plain way, in the same run."""


@bench.command()
@click.option("--calls", type=click.IntRange(min=1), default=200_000, show_default=True, help="Calls in a repeat.")
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def control(calls: int, repeats: int, as_json: bool) -> None:
    """Cost of Checkpointer.step() when nothing is asked."""
    from slurm_resil.bench.control import measure

    measure(calls=calls, repeats=repeats).show(as_json=as_json)


@bench.command()
@click.option("--size-mib", type=click.IntRange(min=4), default=2048, show_default=True, help="Size of the checkpoint.")
@click.option("--nodes", type=click.IntRange(min=1), default=2, show_default=True, help="Movers, all on this host.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--dir", "target", type=click.Path(exists=True, file_okay=False), help="Where to drain to.")
@click.option("--settle", type=click.FloatRange(min=0), default=3.0, show_default=True, help="Pause before each, s.")
@click.option("--training/--no-training", default=True, show_default=True, help="Also what a training feels of it.")
@click.option("--tune", "tunes", is_flag=True, help="Instead find good settings; prints lines for site.toml.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def drain(
    size_mib: int,
    nodes: int,
    repeats: int,
    target: str | None,
    settle: float,
    training: bool,
    tunes: bool,
    as_json: bool,
) -> None:
    """How long a drain over MPI takes, against dd, cp and narrow writes of the same bytes."""
    if tunes:
        _tune(size_mib << 20, nodes, repeats, target, settle, as_json)
        return
    from slurm_resil.bench.drain import measure
    from slurm_resil.bench.training import WINDOW_S

    result = measure(
        size_bytes=size_mib << 20,
        nodes=nodes,
        repeats=repeats,
        target=target,
        settle_s=settle,
        training_s=WINDOW_S if training else 0.0,
    )
    result.show(as_json=as_json)


def _tune(size_bytes: int, nodes: int, repeats: int, target: str | None, settle: float, as_json: bool) -> None:
    from slurm_resil.bench.tune import Try, tune

    def say(one: Try) -> None:
        words = " ".join(one.arguments) or "without settings"
        click.echo(f"{one.seconds:8.3f} s  {words}", err=True)

    found = tune(size_bytes=size_bytes, nodes=nodes, repeats=repeats, target=target, settle_s=settle, say=say)
    for note in found.notes:
        click.echo(note, err=True)
    if not as_json:
        click.echo(found.best.words)
        return
    tried = [{"arguments": one.arguments, "seconds": one.seconds} for one in found.tried]
    gain = (found.best.seconds or 0.0) / found.usual
    result = {"bench": "drain", "tried": tried, "site_toml": found.best.words, "ratio": gain, "notes": found.notes}
    click.echo(json.dumps(result))


@bench.command()
@click.option("--size-mib", type=click.IntRange(min=16), default=256, show_default=True, help="Size of each shard.")
@click.option("--nodes", type=click.IntRange(min=2), default=4, show_default=True, help="Movers, all on this host.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False), help="Burst buffers.  [/dev/shm]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def redundancy(size_mib: int, nodes: int, repeats: int, directory: str | None, as_json: bool) -> None:
    """What an encode costs over MPI, against copying, sending, and the code alone."""
    from slurm_resil.bench.redundancy import measure

    measure(size_bytes=size_mib << 20, nodes=nodes, repeats=repeats, directory=directory).show(as_json=as_json)


@bench.command()
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hooks(repeats: int, as_json: bool) -> None:
    """What prolog and epilog add to a job, against an interpreter that does nothing."""
    from slurm_resil.bench.hooks import measure

    measure(repeats=repeats).show(as_json=as_json)


@bench.command()
@click.option("--size-mib", type=click.IntRange(min=1), default=1024, show_default=True, help="Size of the state.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False), help="Where to save.  [/dev/shm]")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also torch.save and DCP.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def save(size_mib: int, dtype: str, repeats: int, directory: str | None, peers: bool, as_json: bool) -> None:
    """What a save costs the training, against a plain copy, torch.save and DCP."""
    from slurm_resil.bench.save import measure

    result = measure(size_bytes=size_mib << 20, repeats=repeats, dtype=dtype, directory=directory, peers=peers)
    result.show(as_json=as_json)


@bench.command()
@click.option("--size-mib", type=click.IntRange(min=1), default=1024, show_default=True, help="Size of the state.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--dir", "directory", type=click.Path(exists=True, file_okay=False), help="Where from.  [/dev/shm]")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also torch.load and DCP.")
@click.option("--nodes", type=click.IntRange(min=0), help="Movers of a fetch; 0: without one.  [4 where there is MPI]")
@click.option("--pfs-rate", type=click.FloatRange(min=1), help="Most bytes/s of storage for all of them, for a fetch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def restore(
    size_mib: int,
    dtype: str,
    repeats: int,
    directory: str | None,
    peers: bool,
    nodes: int | None,
    pfs_rate: float | None,
    as_json: bool,
) -> None:
    """How long a restore takes, against a plain read and copy, torch.load and DCP, and a fetch against plain reads."""
    from slurm_resil.bench.restore import measure

    result = measure(
        size_bytes=size_mib << 20,
        repeats=repeats,
        dtype=dtype,
        directory=directory,
        peers=peers,
        nodes=nodes,
        pfs_bytes_s=pfs_rate,
    )
    result.show(as_json=as_json)
