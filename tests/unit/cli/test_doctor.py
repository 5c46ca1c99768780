"""doctor: every finding is ok, bad or unknown; what is bad has a mend; what hangs does not stop the rest."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_resil.cli import doctor
from slurm_resil.core import config
from slurm_resil.core.errors import ConfigError, ServiceError
from slurm_resil.core.settings import Settings
from slurm_resil.slurm.scontrol import Commands


class Said(Commands):
    """Commands that say what the test wants."""

    def __init__(self, said: dict[str, str | Exception]) -> None:
        super().__init__({})
        self._said = said

    def run(self, *argv: str) -> str:
        answer = self._said.get(" ".join(argv), self._said.get(argv[0], ServiceError("no answer")))
        if isinstance(answer, Exception):
            raise answer
        return answer


def here(
    said: dict[str, str | Exception] | None = None, env: dict[str, str] | None = None, **document: dict[str, object]
) -> doctor.Here:
    site = config.parse(document, "/etc/site.toml")
    settings = Settings.from_env(env or {}, site)
    return doctor.Here(env={"PATH": "/nowhere"} | (env or {}), site=site, settings=settings, commands=Said(said or {}))


def one(name: str, where: doctor.Here) -> doctor.Finding:
    (found,) = doctor.examine(where, {name: doctor.CHECKS[name]}, limit_s=5)
    return found


CONFIG = "JobRequeue              = {}\nKillWait                = {} sec\nPreemptMode             = {}\n"


@pytest.mark.parametrize(
    ("values", "result", "mend"),
    [
        ((1, 30, "REQUEUE"), "ok", ""),
        ((1, 30, "OFF"), "ok", ""),
        ((0, 30, "REQUEUE"), "bad", "JobRequeue=1"),
        ((1, 30, "GANG,CANCEL"), "bad", "PreemptMode=REQUEUE"),
        ((1, 1, "REQUEUE"), "bad", "KillWait=30"),
    ],
)
def test_requeue(values: tuple[object, ...], result: str, mend: str) -> None:
    found = one("requeue", here({"scontrol": CONFIG.format(*values)}))
    assert (found.result, mend in found.mend, bool(found.mend)) == (result, True, bool(mend))


def test_a_service_that_does_not_answer_is_unknown_and_not_bad() -> None:
    for name in ("slurmctld", "requeue", "spank", "munge"):
        found = one(name, here())
        assert (found.result, bool(found.mend)) == ("unknown", True), name
    assert one("requeue", here({"scontrol": "Configuration data"})).result == "unknown"


def test_munge_is_mended_by_munge() -> None:
    no_slurm = ServiceError("munge: no socket", mend="`scontrol ping` says whether slurmctld runs")
    found = one("munge", here({"munge": no_slurm}))
    assert (found.result, found.mend) == ("unknown", "start munged")


@pytest.mark.parametrize(
    ("said", "result"), [("Slurmctld(primary) at ctl is UP", "ok"), ("Slurmctld(primary) at ctl is DOWN", "bad")]
)
def test_slurmctld(said: str, result: str) -> None:
    assert one("slurmctld", here({"scontrol": said})).result == result


def test_missing_commands_are_named(tmp_path: Path) -> None:
    found = one("slurm", here())
    assert (found.result, "sbatch" in found.found) == ("bad", True)
    for name in ("sbatch", "srun", "scontrol", "squeue"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    for said, result in (("slurm-wlm 22.05.8", "ok"), ("slurm 21.08.1", "bad"), ("slurm", "unknown")):
        assert one("slurm", here({"scontrol": said}, {"PATH": str(tmp_path)})).result == result


@pytest.mark.parametrize(("said", "result"), [("  --resil-every=N   checkpoint", "ok"), ("Usage: sbatch", "bad")])
def test_spank(said: str, result: str) -> None:
    assert one("spank", here({"sbatch": said})).result == result


def test_a_package_that_is_missing_is_bad_with_the_command_that_installs_it() -> None:
    import sys

    said = {sys.executable: ServiceError("Traceback\nModuleNotFoundError: No module named 'torch'")}
    found = one("torch", here(said))
    assert (found.result, found.found) == ("bad", "torch: ModuleNotFoundError: No module named 'torch'")
    assert "pip install 'slurm-resil[torch]'" in found.mend
    assert one("torch", here({sys.executable: ServiceError("python did not answer in 20 s")})).result == "unknown"


def test_the_sites_burst_buffer_is_roots(tmp_path: Path) -> None:
    root = tmp_path / "bb"
    where = here(burst_buffer={"root": str(root)})
    assert "does not exist" in one("burst_buffer", where).found
    root.mkdir()
    root.chmod(0o777)
    found = one("burst_buffer", where)
    assert (found.result, "chmod 755" in found.mend) == ("bad", True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_prefix_that_cannot_be_written() -> None:
    assert one("prefix", here(env={"SLURM_RESIL_PREFIX": "/proc/x"})).result == "bad"


def test_a_prefix_in_memory_is_no_shared_one() -> None:
    found = one("prefix", here(env={"SLURM_RESIL_PREFIX": "/dev/shm/runs"}))
    assert (found.result, "other nodes do not see it" in found.found) == ("bad", True)


def test_engine() -> None:
    assert one("engine", here()).result == "ok"
    assert one("engine", here(env={"SLURM_RESIL_ENGINE": "127.0.0.1:1"})).result == "bad"


def test_one_that_hangs_or_breaks_does_not_stop_the_others() -> None:
    over = threading.Event()

    def hangs(_: doctor.Here) -> doctor.Answer:
        over.wait(30)
        return doctor.OK, "", ""

    def breaks(_: doctor.Here) -> doctor.Answer:
        raise RuntimeError("oops")

    def refuses(_: doctor.Here) -> doctor.Answer:
        raise ConfigError("no", mend="do this")

    checks = {"hangs": hangs, "breaks": breaks, "refuses": refuses, "works": lambda _: (doctor.OK, "fine", "")}
    found = doctor.examine(here(), checks, limit_s=0.2)
    over.set()
    assert [entry.result for entry in found] == ["unknown", "unknown", "bad", "ok"]
    assert [entry.found for entry in found] == ["no answer in 0.2 s", "RuntimeError: oops", "no", "fine"]
    assert found[2].mend == "do this"


def test_all_that_hang_cost_one_time_limit_together() -> None:
    over = threading.Event()

    def hangs(_: doctor.Here) -> doctor.Answer:
        over.wait(30)
        return doctor.OK, "", ""

    began = time.monotonic()
    found = doctor.examine(here(), dict.fromkeys("abcdefgh", hangs), limit_s=1.0)
    spent = time.monotonic() - began
    over.set()
    assert [entry.result for entry in found] == ["unknown"] * 8
    assert spent < 4.0


@pytest.mark.parametrize(("results", "code"), [(("ok",), 0), (("ok", "unknown"), 69), (("unknown", "bad"), 1)])
def test_exit_codes_and_json(monkeypatch: pytest.MonkeyPatch, results: tuple[str, ...], code: int) -> None:
    checks = {f"c{index}": (lambda _, result=result: (result, "x", "")) for index, result in enumerate(results)}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    done = CliRunner().invoke(doctor.doctor, ["--json"])
    assert done.exit_code == code
    assert [entry["result"] for entry in json.loads(done.stdout)["checks"]] == list(results)


NODES = "\n".join(f"NodeName=n{number} State=IDLE" for number in range(1, 9))


@pytest.mark.parametrize(
    ("scheme", "sets", "words", "mend"),
    [
        ("single", "", ("scheme is single: the loss of a node costs what was not drained", "auto"), ""),
        ("xor", "2", ("on 8 nodes: scheme is xor: 4 sets of 2 nodes, each survives the loss of 1", "100 %"), ""),
        ("rs:2", "4", ("2 sets of 4 nodes, each survives the loss of 2 of its nodes", "100 %", "2 of r"), ""),
        ("xor", "8", ("1 set of 8 nodes", "14 %"), "nothing covers the loss of r r1 (up to 4 nodes in 1 set), r2"),
    ],
)
def test_what_protection_a_job_gets(tmp_path: Path, scheme: str, sets: str, words: tuple[str, ...], mend: str) -> None:
    groups = tmp_path / "groups.toml"
    groups.write_text('[r]\nr1 = "n[1-4]"\nr2 = "n[5-8]"\n')
    env = {"SLURM_RESIL_REDUNDANCY": scheme, **({"SLURM_RESIL_SET_SIZE": sets} if sets else {})}
    where = here({"scontrol -o show node": NODES}, env, redundancy={"failure_groups": f"file:{groups}"})
    found = one("redundancy", where)
    assert found.result == "ok"
    assert all(part in found.found for part in words), found.found
    assert (mend in found.mend) and bool(found.mend) == bool(mend), found.mend


def test_nodes_of_which_it_is_not_known_what_fails_together() -> None:
    env = {"SLURM_RESIL_REDUNDANCY": "xor", "SLURM_JOB_NODELIST": "n[1-4]"}
    found = one("redundancy", here({}, env, redundancy={"failure_groups": "topology"}))
    assert (found.result, "on 4 nodes" in found.found) == ("unknown", True)
    assert "no answer" in found.found and "as if every node failed alone" in found.mend
    assert one("redundancy", here({}, {"SLURM_RESIL_REDUNDANCY": "xor"})).result == "unknown"  # which nodes at all
    alone = one("redundancy", here({}, env | {"SLURM_JOB_NODELIST": "n1"}, redundancy={"failure_groups": "none"}))
    assert "nothing is protected: one node has nobody that could protect it" in alone.found
