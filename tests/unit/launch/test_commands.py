from dataclasses import replace
from typing import get_args

import pytest

from slurm_resil.agent.place import from_env
from slurm_resil.core import config
from slurm_resil.core.config import Drain
from slurm_resil.core.errors import ConfigError, UsageError
from slurm_resil.core.layout import Layout
from slurm_resil.core.model import RunInfo
from slurm_resil.core.settings import Settings
from slurm_resil.launch import commands
from slurm_resil.launch.commands import Move
from slurm_resil.launch.moves import MoverKind


def job(**changes):
    layout = changes.pop("layout", Layout(nodes=("n1", "n5", "n3"), ranks_per_node=2))
    values = {
        "info": RunInfo(run_id="r", job_id=12, attempt=1, cycle=0, world_size=layout.world_size, nodes=3),
        "layout": layout,
        "addresses": {"n1": "10.0.0.1", "n3": "10.0.0.3", "n5": "10.0.0.5"},
        "run_dir": "/pfs/r",
        "job_dir": "/bb/job-12",
        "restarts": 1,
        "every": 25,
        "leader": "10.0.0.1:7000",
        "python": "/usr/bin/python3",
        "base_env": {
            "PATH": "/bin",
            "HOME": "/home/a b",
            "SLURM_JOB_ID": "12",
            "SLURM_CONF": "/etc/s.conf",
            "SLURM_NTASKS": "9",
            "SLURM_NNODES": "4",
            "SLURM_NODELIST": "n[1-5]",
            "SLURM_STEP_ID": "0",
            "SLURM_EXPORT_ENV": "NONE",
            "PMI_RANK": "0",
            "SLURM_GPUS_PER_NODE": "8",
        },
    }
    return commands.Job(**{**values, **changes})


def test_the_jobs_shape_never_reaches_a_step():
    for command in (
        commands.ranks(job(), 0, ["true"]),
        commands.agents(job(), 0, ["n3"]),
        commands.mover(job(), Move(kind="drain", iteration=40)),
    ):
        assert not set(command.env) & commands.TRAPS
        assert not [name for name in command.env if name.startswith(("SLURM_STEP", "PMI_"))]
        assert command.env["SLURM_JOB_ID"] == "12"
        assert command.env["SLURM_CONF"] == "/etc/s.conf"
        assert "--export=ALL" in command.argv  # sbatch --export=NONE must not hide our variables
        assert "--overlap" in command.argv


def test_ranks_are_one_task_each_on_the_nodes_of_the_layout():
    command = commands.ranks(job(), 2, ["python", "train.py", "--name", "a b"])
    # arbitrary: task numbers, and so srun's labels, are the ranks
    assert {"--ntasks=6", "--distribution=arbitrary"} <= set(command.argv)
    assert not [word for word in command.argv if word.startswith("--nodes=")]  # 24.11: incompatible with arbitrary
    assert "--nodelist=n1,n1,n5,n5,n3,n3" in command.argv
    assert {"--cpu-bind=none", "--label", "--unbuffered", "--overcommit"} <= set(command.argv)
    assert command.argv[-4:] == ("python", "train.py", "--name", "a b")
    assert command.argv[-7:-4] == ("-m", "slurm_resil.launch.rank", "--")
    assert command.env["SLURM_RESIL_LAYOUT"] == "n1,n5,n3"
    assert command.env["MASTER_ADDR"] == "10.0.0.1"
    assert command.env["SLURM_RESIL_CYCLE"] == "2"
    assert command.env["SLURM_RESIL_EVERY"] == "25"
    assert command.env["SLURM_RESIL_BB_ROOT"] == "/bb"
    assert command.env["SLURM_RESIL_PREFIX"] == "/pfs"


def test_the_rendezvous_moves_with_every_cycle_and_attempt():
    ports = {commands.ranks(job(), cycle, ["x"]).env["MASTER_PORT"] for cycle in range(4)}
    assert len(ports) == 4


def test_gpus_are_for_ranks_only():
    assert commands.ranks(job(), 0, ["x"]).env["SLURM_GPUS_PER_NODE"] == "8"
    agents = commands.agents(job(), 0, ["n1", "n3"])
    assert "SLURM_GPUS_PER_NODE" not in agents.env
    assert "--gres=none" in agents.argv
    assert "--no-kill" in agents.argv
    assert "--no-kill" not in commands.ranks(job(), 0, ["x"]).argv


def test_drains_get_the_patience_and_the_hints_of_site_and_job():
    site = config.parse({"drain": {"hints": {"cb_nodes": 4, "striping_factor": 8}, "retry": "2min"}}, "/site.toml")
    held = Settings.from_env({"SLURM_SUBMIT_DIR": "/a"}, site)
    assert commands.drain_args(held) == ["--retry", "120", "--hint=cb_nodes=4", "--hint=striping_factor=8"]
    held = Settings.from_env({"SLURM_RESIL_RETRY": "0s", "SLURM_RESIL_HINTS": "a=b,c"}, site)
    assert commands.drain_args(held) == ["--retry", "0", "--hint=a=b,c"]
    site = Drain(buffer_bytes=1 << 20, gather=False, hints={"x": "1"})
    assert commands.drain_args(held, site)[2:] == ["--hint=a=b,c", "--buffer=1048576", "--no-gather"]


def test_mover_is_an_mpi_step_with_one_process_per_node():
    command = commands.mover(job(), Move(kind="drain", iteration=40, cap_bytes_s=1000.0))
    assert {"--mpi=pmi2", "--ntasks=3", "--nodelist=n1,n5,n3"} <= set(command.argv)
    assert command.argv[-4:] == ("--on-term", "stop", "--cap", "1000")
    last = commands.mover(job(), Move(kind="encode", iteration=40, finish=True, arguments=("--scheme", "xor")))
    assert last.argv[-4:] == ("--on-term", "finish", "--scheme", "xor")
    assert last.argv[last.argv.index("mover") + 1] == "encode"
    assert "--job-name=resil-encode-40@1" in last.argv


def test_no_step_has_the_name_of_one_of_another_attempt():
    """They are killed by name, and a launcher may outlive its attempt."""

    def names(attempt):
        made = job(info=replace(job().info, attempt=attempt))
        moves = [Move(kind=kind, iteration=40) for kind in get_args(MoverKind)]
        made_of = [commands.mover(made, move) for move in moves]
        made_of += [commands.ranks(made, 2, ["x"]), commands.agents(made, 2, ["n1"])]
        made_of += [commands.mark(made, ["n1"], "/a", "b")]
        return [command.step for command in made_of]

    every = [*names(1), *names(2), *names(11)]
    assert all(every)
    assert len(set(every)) == len(every)


def test_a_layout_too_long_for_a_variable_goes_to_a_file():
    nodes = tuple(f"node-of-a-rack-{i:05d}" for i in range(6000))
    value, text = commands.layout_variable(Layout(nodes=nodes, ranks_per_node=8), "/pfs/r")
    assert value == "@/pfs/r/layout.names"
    assert text.split(",")[-1] == nodes[-1]
    long = job(layout=Layout(nodes=nodes, ranks_per_node=8))
    argv = commands.ranks(long, 0, ["x"]).argv
    assert "--ntasks-per-node=8" in argv
    assert "--distribution=arbitrary" not in argv
    assert max(map(len, argv)) < 131_072


@pytest.mark.parametrize(
    "argument", ["--nodes=2", "-N2", "-wn1", "--nodelist=n1", "--export=NONE", "-n", "-x", "-mblock"]
)
def test_srun_arguments_that_would_move_ranks_are_refused(argument):
    with pytest.raises(UsageError, match="--ranks-per-node"):
        commands.check_srun_args([argument])


def test_other_srun_arguments_pass():
    commands.check_srun_args(["--mpi=pmix", "--mem=0", "-c4"])
    argv = commands.ranks(job(srun_args=("--mpi=pmix",)), 0, ["x"]).argv
    assert argv.index("--mpi=pmix") > argv.index("--mpi=none")  # the last one wins


@pytest.mark.parametrize("slots", [3, 4])
def test_what_the_launcher_has_found_holds_where_the_site_leaves_nothing_to_jobs(tmp_path, slots):
    site = tmp_path / "site.toml"
    site.write_text('[burst_buffer]\nroot = "/bb"\n[security]\nuser_may = ["prefix", "every"]\n')
    made = job(slots=slots, base_env={"SLURM_RESIL_SITE": str(site)})
    for command in (commands.agents(made, 0, ["n3"]), commands.ranks(made, 0, ["x"])):
        place = from_env({**command.env, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "6"})
        assert (place.slots, place.every) == (slots, 25)
    with pytest.raises(ConfigError, match="leaves 'slots' to nobody"):
        from_env({"SLURM_RESIL_SITE": str(site), "SLURM_RESIL_SLOTS": str(slots)})
