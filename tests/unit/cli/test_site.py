"""site: the examples are valid, what is checked in is what render writes, install touches nobody else's files."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_resil.cli import hook, site
from slurm_resil.core import config
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.settings import Settings
from slurm_resil.hooks import base

CONFIGS = Path(__file__).resolve().parents[3] / "site_configs"
EXAMPLE = CONFIGS / "nvme-lustre.toml"
LATE = {"late": True, "late_limit": "3600"}
OPT = ("--python", "/opt/slurm-resil/bin/python", "--packages", "/opt/slurm-resil/lib/python3.11/site-packages")


def invoke(*argv: str | Path) -> Result:
    return CliRunner().invoke(site.site, [str(word) for word in argv])


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_valid_and_serves_a_job(path: Path) -> None:
    made = config.load({}, str(path))
    assert Settings.from_env({}, made).interval_s.value
    done = invoke("check", "--site", path, "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (0, True)


def test_there_is_an_example_per_kind_of_site() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {"nvme-lustre", "tmpfs-nfs", "single-host"}


def test_what_is_checked_in_is_what_render_writes(tmp_path: Path) -> None:
    assert invoke("render", "--site", EXAMPLE, "--out", tmp_path, *OPT).exit_code == 0
    rendered = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    there = {path.relative_to(CONFIGS) for path in CONFIGS.rglob("*") if path.is_file() and path.suffix != ".toml"}
    assert set(rendered) == there
    for name, path in rendered.items():
        assert path.read_text() == (CONFIGS / name).read_text(), name
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.suffix == ".sh" else 0o644)


def test_check_shows_values_with_their_sources(tmp_path: Path) -> None:
    path = written(tmp_path / "s.toml", '[schedule]\nlead = "90s"\n')
    values = json.loads(invoke("check", "--site", path, "--json").stdout)["values"]
    assert values["schedule.lead"] == {"value": 90.0, "source": f"{path} [schedule] lead"}
    assert values["job.lead_s"]["value"] == 90.0
    assert values["requeue.max_restarts"] == {"value": 3, "source": "default"}
    assert "90.0" in invoke("check", "--site", path).stdout


def test_check_says_how_a_job_on_nodes_is_protected(tmp_path: Path) -> None:
    groups = written(tmp_path / "groups.toml", '[rack]\nr1 = "n[1-3]"\nr2 = "n4"\n')
    path = written(tmp_path / "site.toml", f'[redundancy]\nscheme = "xor"\nfailure_groups = "file:{groups}"\n')
    done = invoke("check", "--site", path, "--nodes", "n[1-5]")
    assert done.exit_code == 0, done.output
    assert "protection: scheme is xor: 1 set of 5 nodes, each survives the loss of 1 of its nodes" in done.output
    assert "protection: failure groups: 2 of rack" in done.output
    assert "protection: the rack of n5 is not known" in done.output
    assert "warning: xor covers the loss of 1 node of a set" in done.output
    raw = json.loads(invoke("check", "--site", path, "--nodes", "n[1-5]", "--json").output)
    assert set(raw["protection"]) == {"words", "warnings", "unknown"} and raw["protection"]["warnings"]
    assert invoke("check", "--site", path, "--nodes", "n[1-").exit_code == 2
    assert "protection" not in json.loads(invoke("check", "--site", path, "--json").output)


def test_check_tells_all_faults(tmp_path: Path) -> None:
    path = written(tmp_path / "s.toml", "[schedule]\nlead = 5\n[nothing]\n")
    done = invoke("check", "--site", path, "--json")
    assert done.exit_code == 78
    told = json.loads(done.stdout)
    assert (told["ok"], len(told["faults"])) == (False, 2)
    assert isinstance(invoke("check", "--site", path).exception, ConfigError)


def test_the_rendered_scripts_run(tmp_path: Path) -> None:
    path = written(tmp_path / "s.toml", f'[burst_buffer]\nroot = "{tmp_path}/bb"\n')
    files = site.render_files(config.load({}, str(path)), python=sys.executable, plugin="slurm_resil.so")
    (tmp_path / "bb").mkdir(mode=0o755)
    written(tmp_path / "hooks.json", files["hooks.json"].text).chmod(0o644)
    assert base._flat(files["hooks.json"].text) == {"bb_root": f"{tmp_path}/bb", "always": False} | LATE
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GID": str(os.getgid())}
    env["SPANK_SLURM_RESIL"] = "1"
    for name, there in (("prolog", True), ("epilog", False)):
        text = files[f"{name}.d/slurm-resil.sh"].text.replace(base.DEFAULT_CONFIG, str(tmp_path / "hooks.json"))
        script = written(tmp_path / f"{name}.sh", text)
        script.chmod(0o755)
        done = subprocess.run([script], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "bb" / "job-7").exists() is there


def test_how_long_things_are_kept_is_told_to_the_prolog(tmp_path: Path) -> None:
    path = written(tmp_path / "s.toml", '[burst_buffer]\nroot = "/bb"\nkeep = "2d"\n')
    files = site.render_files(config.load({}, str(path)), python="/bin/python", plugin="a.so")
    assert json.loads(files["hooks.json"].text)["keep"] == "172800"


@pytest.mark.parametrize(
    ("said", "hooks"),
    [("", LATE), ('late_limit = "10min"', LATE | {"late_limit": "600"}), ('late = "off"', {}), ('late = "job"', {})],
)
def test_the_epilog_hands_over_unless_the_site_says_otherwise(
    tmp_path: Path, said: str, hooks: dict[str, object]
) -> None:
    path = written(tmp_path / "s.toml", f'[burst_buffer]\nroot = "/bb"\n[drain]\n{said}\n')
    files = site.render_files(config.load({}, str(path)), python="/bin/python", plugin="a.so")
    made = written(tmp_path / "hooks.json", files["hooks.json"].text)
    made.chmod(0o644)
    assert base.load_config(str(made)) == {"bb_root": "/bb", "always": False} | hooks


@pytest.mark.parametrize("limit", ["0", "", "-5", "5s", "\u0665", "9999999999"])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: str) -> None:
    made = written(tmp_path / "hooks.json", json.dumps({"bb_root": "/bb", "late_limit": limit}))
    made.chmod(0o644)
    with pytest.raises(base.HookError, match="late_limit is"):
        base.load_config(str(made))


def test_hooks_need_a_directory_of_the_site() -> None:
    with pytest.raises(ConfigError, match="burst_buffer"):
        site.render_files(config.Site(), python="/usr/bin/python3", plugin="a.so")


@pytest.mark.parametrize(
    ("python", "plugin"), [("python3", "a.so"), ("/opt/my python", "a.so"), ("/usr/bin/python3", "a b.so")]
)
def test_paths_that_scripts_and_units_cannot_hold(python: str, plugin: str) -> None:
    with pytest.raises(ConfigError) as caught:
        site.render_files(config.load({}, str(EXAMPLE)), python=python, plugin=plugin)
    assert len(caught.value.faults) == 1


def test_no_engine_no_unit() -> None:
    files = site.render_files(config.load({}, str(CONFIGS / "tmpfs-nfs.toml")), python="/bin/python", plugin="a.so")
    assert not any(name.startswith("systemd") for name in files)


def test_install_writes_once_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    argv = ("install", "--site", EXAMPLE, "--root", tmp_path, *OPT)
    assert "would be written" in invoke(*argv, "--dry-run").stdout
    assert list(tmp_path.iterdir()) == []
    assert invoke(*argv).exit_code == 0
    assert (tmp_path / "etc/slurm-resil/hooks.json").read_text() == (CONFIGS / "hooks.json").read_text()
    assert os.access(tmp_path / "etc/slurm/prolog.d/slurm-resil.sh", os.X_OK)
    assert invoke(*argv).stdout.count("as it is") == 7
    theirs = written(tmp_path / "etc/slurm/epilog.d/slurm-resil.sh", "#!/bin/sh\n")
    unit = tmp_path / "etc/systemd/system/slurm-resil-engine.service"
    unit.unlink()
    refused = invoke(*argv)
    assert isinstance(refused.exception, ConfigError)
    assert str(theirs) in str(refused.exception)
    assert (theirs.read_text(), unit.exists()) == ("#!/bin/sh\n", False)
    assert invoke(*argv, "--force").exit_code == 0
    assert "exec" in theirs.read_text()


def test_hooks_can_be_run_by_hand(tmp_path: Path) -> None:
    path = written(tmp_path / "hooks.json", "{}")
    path.chmod(0o644)
    done = CliRunner().invoke(hook.hook, ["prolog", "--config", str(path)])
    assert (done.exit_code, "bb_root" in done.output) == (1, True)
