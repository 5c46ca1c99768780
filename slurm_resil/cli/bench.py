"""``slurm-resil bench``: measurements on this system."""

from __future__ import annotations

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
@click.option("--size-mib", type=click.IntRange(min=1), default=256, show_default=True, help="Size of the checkpoint.")
@click.option("--nodes", type=click.IntRange(min=1), default=2, show_default=True, help="Movers, all on this host.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--dir", "target", type=click.Path(exists=True, file_okay=False), help="Where to drain to.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def drain(size_mib: int, nodes: int, repeats: int, target: str | None, as_json: bool) -> None:
    """Throughput of the drain over MPI, against a plain copy of the same bytes."""
    from slurm_resil.bench.drain import measure

    measure(size_bytes=size_mib << 20, nodes=nodes, repeats=repeats, target=target).show(as_json=as_json)


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def restore(size_mib: int, dtype: str, repeats: int, directory: str | None, peers: bool, as_json: bool) -> None:
    """How long a restore takes, against a plain read and copy, torch.load and DCP."""
    from slurm_resil.bench.restore import measure

    result = measure(size_bytes=size_mib << 20, repeats=repeats, dtype=dtype, directory=directory, peers=peers)
    result.show(as_json=as_json)
