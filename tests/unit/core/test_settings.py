"""A job's settings: environment over site over default, each value with its source."""

import os
import pwd
import re
from pathlib import Path

import pytest

from slurm_resil.core import config
from slurm_resil.core.errors import ConfigError
from slurm_resil.core.retention import ALL, Best, Retention
from slurm_resil.core.settings import VARIABLES, Settings, strangers

NONE = config.Site()
SITE = config.parse(
    {
        "burst_buffer": {"root": "/local/resil"},
        "prefix": {"root": "/scratch/{user}/{uid}"},
        "schedule": {"lead": "90s", "every": 500},
        "drain": {"cap": "1GB/s"},
        "engine": {"address": "ctl:1"},
    },
    "/etc/site.toml",
)


def test_defaults_work_on_one_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    made = Settings.from_env({}, NONE)
    assert made.bb_root.value == f"/dev/shm/slurm-resil-{os.getuid()}"
    assert made.prefix_root.value == str(tmp_path / ".slurm-resil")
    assert [made.every.value, made.interval_s.value, made.lead_s.value, made.cap_bytes_s.value] == [None] * 4
    assert made.engine.value == ""
    assert not made.retention.deletes  # what nobody asked to be deleted stays
    assert {value.source for value in vars(made).values()} == {"default"}


def test_the_directory_of_submission_is_the_default_of_the_prefix() -> None:
    assert Settings.from_env({"SLURM_SUBMIT_DIR": "/home/a"}, NONE).prefix_root.value == "/home/a/.slurm-resil"


def test_the_site_replaces_defaults() -> None:
    made = Settings.from_env({"SLURM_SUBMIT_DIR": "/home/a"}, SITE)
    assert made.bb_root.value == "/local/resil"
    assert made.prefix_root.value == f"/scratch/{pwd.getpwuid(os.getuid()).pw_name}/{os.getuid()}"
    assert (made.every.value, made.lead_s.value, made.cap_bytes_s.value) == (500, 90.0, 1e9)
    assert made.lead_s.source == "/etc/site.toml [schedule] lead"
    assert made.interval_s.source == "default"


def test_the_environment_replaces_the_site() -> None:
    env = {
        "SLURM_RESIL_BB_ROOT": "/mnt/bb",
        "SLURM_RESIL_PREFIX": "runs",
        "SLURM_RESIL_EVERY": "7",
        "SLURM_RESIL_INTERVAL": "10min",
        "SLURM_RESIL_LEAD": "1:30:00",
        "SLURM_RESIL_CAP": "10MB/s",
        "SLURM_RESIL_RETRY": "5min",
        "SLURM_RESIL_HINTS": "striping_factor=8, cb_config_list=n1:1,n2:2",
        "SLURM_RESIL_ENGINE": "other:2",
        "SLURM_RESIL_KEEP_LAST": "3",
        "SLURM_RESIL_KEEP_EVERY": "1000",
        "SLURM_RESIL_KEEP_INTERVAL": "1h",
        "SLURM_RESIL_KEEP_BEST": "loss:min:2",
        "SLURM_RESIL_REDUNDANCY": "xor, rs:2 every 10",
        "SLURM_RESIL_SET_SIZE": "6",
        "SLURM_RESIL_SLOTS": "5",
    }
    made = Settings.from_env(env, SITE)
    assert made.bb_root.value == "/mnt/bb"
    assert made.prefix_root.value == os.path.abspath("runs")
    assert (made.every.value, made.interval_s.value, made.lead_s.value) == (7, 600.0, 5400.0)
    assert (made.cap_bytes_s.value, made.engine.value) == (1e7, "other:2")
    assert made.retry_s.value == 300.0
    assert dict(made.hints.value) == {"striping_factor": "8", "cb_config_list": "n1:1,n2:2"}
    assert (str(made.redundancy.value), made.set_size.value) == ("xor,rs/10", 6)
    best = Best(metric="loss", count=2)
    assert made.retention == Retention(keep_last=3, every_iterations=1000, every_s=3600.0, best=best)
    assert {value.source for value in vars(made).values()} == set(env)


def test_an_empty_variable_is_none() -> None:
    assert Settings.from_env({"SLURM_RESIL_EVERY": ""}, SITE).every.source.startswith("/etc/site.toml")


def test_all_wrong_variables_are_told_at_once() -> None:
    env = {
        "SLURM_RESIL_BB_ROOT": "bb",
        "SLURM_RESIL_EVERY": "0",
        "SLURM_RESIL_INTERVAL": "0s",
        "SLURM_RESIL_LEAD": "soon",
        "SLURM_RESIL_CAP": "fast",
        "SLURM_RESIL_RETRY": "400d",
        "SLURM_RESIL_HINTS": "striping_factor=many",
        "SLURM_RESIL_ENGINE": "ctl",
        "SLURM_RESIL_COLOUR": "red",
    }
    with pytest.raises(ConfigError) as caught:
        Settings.from_env(env, NONE)
    assert len(caught.value.faults) == 9
    for name, value in env.items():
        assert any(name in fault and repr(value) in fault for fault in caught.value.faults), name


@pytest.mark.parametrize(
    ("name", "meant"), [("EVRY", "EVERY"), ("INTERVALL", "INTERVAL"), ("every", ""), ("BBROOT", "BB_ROOT"), ("FOO", "")]
)
def test_a_variable_that_there_is_not_is_told_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({f"SLURM_RESIL_{name}": "10", "SLURM_OTHER": "1", "SLURM_RESIL": "1"}, NONE)
    (fault,) = caught.value.faults
    assert fault.startswith(f"SLURM_RESIL_{name}='10' is no variable of slurm_resil")
    assert ("is meant?" in fault or f"is SLURM_RESIL_{meant} meant?" in fault) is bool(meant)
    assert all(known in fault for known in VARIABLES)


def test_every_variable_that_this_package_sets_or_reads_is_known() -> None:
    root = Path(__file__).parents[3]
    files = [p for top in ("slurm_resil", "spank", "jobscripts", "site_configs") for p in (root / top).rglob("*")]
    texts = [
        path.read_text() for path in files if path.suffix in (".py", ".c", ".h", ".sh", ".sbatch", ".conf", ".toml")
    ]
    found = {name for text in texts for name in re.findall(r"SLURM_RESIL_[A-Z][A-Z_]*[A-Z]", text)}
    assert len(found) > 15
    assert strangers(dict.fromkeys(found, "x")) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("INTERVAL", value) for value in ("-5min", "0s", "1e30", "1e30s", "99999999999d", "10", "nan")),
        *(("LEAD", value) for value in ("-1s", "0s", "400d")),
        *(("EVERY", value) for value in ("0", "-1", "1e30", "9" * 30, "10 000")),
        *(("KEEP_LAST", value) for value in ("0", "-1", "some", "1.5", "9" * 30)),
        *(("KEEP_EVERY", value) for value in ("0", "all")),
        *(("KEEP_INTERVAL", value) for value in ("0s", "10")),
        *(("KEEP_BEST", value) for value in ("loss", "loss:low", ":min", "loss:min:0")),
        *(("ENGINE", value) for value in ("ctl", "ctl:", ":1", "ctl:0", "ctl:99999", "http://ctl:1", "a b:1")),
    ],
)
def test_absurd_values_are_refused_with_what_would_be_right(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({f"SLURM_RESIL_{name}": value}, NONE)
    (fault,) = caught.value.faults
    assert fault.startswith(f"SLURM_RESIL_{name}={value!r} is ") and ("as in" in fault or "write" in fault)


@pytest.mark.parametrize("value", ["-1", "1.5", "٣", "abc"])
def test_a_count_is_plain_digits(value: str) -> None:
    with pytest.raises(ConfigError):
        Settings.from_env({"SLURM_RESIL_EVERY": value}, NONE)


def test_the_site_says_what_a_job_may_set() -> None:
    strict = config.parse({"security": {"user_may": ["every"]}, "schedule": {"lead": "90s"}}, "/etc/site.toml")
    assert Settings.from_env({"SLURM_RESIL_EVERY": "3"}, strict).every.value == 3
    with pytest.raises(ConfigError, match="user_may"):
        Settings.from_env({"SLURM_RESIL_LEAD": "5s"}, strict)


def test_what_a_job_keeps_is_added_to_what_the_site_keeps() -> None:
    site = config.parse({"prefix": {"keep_last": 5, "keep_best": "loss:min"}}, "/etc/site.toml")
    kept = Settings.from_env({"SLURM_RESIL_KEEP_EVERY": "100"}, site).retention
    assert kept == Retention(keep_last=5, every_iterations=100, best=Best(metric="loss"))
    everything = Settings.from_env({"SLURM_RESIL_KEEP_LAST": "all"}, site).retention
    assert everything.keep_last == ALL and not everything.deletes
    strict = config.parse({"prefix": {"keep_last": 5}, "security": {"user_may": ["every"]}}, "/etc/site.toml")
    with pytest.raises(ConfigError, match="user_may"):
        Settings.from_env({"SLURM_RESIL_KEEP_LAST": "1"}, strict)


def test_a_scheme_that_its_sets_are_too_small_for() -> None:
    site = config.parse({"redundancy": {"set_size": 4}}, "/etc/site.toml")
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"SLURM_RESIL_REDUNDANCY": "xor,rs:4/10"}, site)
    (fault,) = caught.value.faults
    assert "rs:4 covers the loss of 4 nodes of a set, which takes 5 at least" in fault
    assert "SLURM_RESIL_REDUNDANCY; /etc/site.toml [redundancy] set_size" in fault
    held = Settings.from_env({"SLURM_RESIL_REDUNDANCY": "xor,rs:4/10", "SLURM_RESIL_SET_SIZE": "8"}, site)
    assert held.set_size.value == 8


@pytest.mark.parametrize("value", ["1", "129", "many", "-4"])
def test_a_size_of_sets(value: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_RESIL_SET_SIZE="):
        Settings.from_env({"SLURM_RESIL_SET_SIZE": value}, NONE)


def test_protection_is_what_the_site_leaves_to_jobs() -> None:
    strict = config.parse({"security": {"user_may": ["every"]}, "redundancy": {"scheme": "xor"}}, "/etc/site.toml")
    assert str(Settings.from_env({}, strict).redundancy.value) == "xor"
    assert str(Settings.from_env({"SLURM_RESIL_REDUNDANCY": "xor"}, strict).redundancy.value) == "xor"
    for name, value in (("REDUNDANCY", "rs:2"), ("SET_SIZE", "4")):
        with pytest.raises(ConfigError, match="user_may"):
            Settings.from_env({f"SLURM_RESIL_{name}": value}, strict)


def test_what_the_launcher_passes_on_is_no_override() -> None:
    strict = config.parse({"security": {"user_may": []}, "schedule": {"lead": "90s"}}, "/etc/site.toml")
    assert Settings.from_env({"SLURM_RESIL_LEAD": "90s"}, strict).lead_s.source == "/etc/site.toml [schedule] lead"


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    with pytest.raises(ConfigError, match="987654"):
        Settings.from_env({}, SITE)


def test_a_slot_more_where_nodes_protect_each_other():
    assert Settings.from_env({}, NONE).slot_count == 3
    assert Settings.from_env({"SLURM_RESIL_REDUNDANCY": "xor"}, NONE).slot_count == 4
    assert Settings.from_env({"SLURM_RESIL_REDUNDANCY": "xor", "SLURM_RESIL_SLOTS": "2"}, NONE).slot_count == 2
    site = config.parse({"burst_buffer": {"slots": 5}}, "/etc/site.toml")
    assert Settings.from_env({}, site).slot_count == 5


@pytest.mark.parametrize("value", ["1", "17", "three", "-2", "2.5"])
def test_a_number_of_slots_that_makes_no_sense(value):
    with pytest.raises(ConfigError, match=r"SLURM_RESIL_SLOTS=.*from 2 to 16"):
        Settings.from_env({"SLURM_RESIL_SLOTS": value}, NONE)
    with pytest.raises(ConfigError, match="slots"):
        config.parse({"burst_buffer": {"slots": int(value) if value in ("1", "17") else value}}, "/etc/site.toml")


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=1",
        "a=",
        "a=1,a=2",
        "a b=1",
        "romio_cb_write=on",
        "cb_nodes=0",
        "striping_unit=-1",
        "x=a\nb",
        "striping_factor=٣",
    ],
)
def test_hints_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_RESIL_HINTS=") as caught:
        Settings.from_env({"SLURM_RESIL_HINTS": text}, NONE)
    assert "as in striping_factor=8" in str(caught.value)


def test_no_patience_at_all_can_be_wanted() -> None:
    assert Settings.from_env({"SLURM_RESIL_RETRY": "0s"}, NONE).retry_s.value == 0.0
    assert Settings.from_env({"SLURM_RESIL_HINTS": "striping_factor=-1"}, NONE).hints.value["striping_factor"] == "-1"
