"""site.toml: what is right is read, what is wrong is told, all of it at once, with file, key, value and an example."""

from pathlib import Path

import pytest

from slurm_resil.core import config
from slurm_resil.core.errors import EXIT_CONFIG, ConfigError
from slurm_resil.core.failure_groups import Source
from slurm_resil.core.protection import Protection
from slurm_resil.core.retention import ALL, Best

FULL = """
[burst_buffer]
root = "/local/slurm-resil/"
all_jobs = true
log = "/var/log/hooks.jsonl"
[prefix]
root = "/scratch/{user}/runs"
keep_last = 3
keep_every = 10000
keep_interval = "6h"
keep_best = "accuracy:max"
[schedule]
lead = "90s"
every = 500
interval = "1h30m"
[redundancy]
scheme = "xor, rs:2 every 10, drain every 5"
set_size = 6
failure_groups = ["feature:rack=(.+)", "file:/etc/groups.toml"]
[drain]
cap = "2GB/s"
retry = "5min"
hints = { striping_factor = 8, romio_cb_write = "enable" }
buffer = "32MiB"
gather = false
[requeue]
max_restarts = 0
max_idle_attempts = 7
[spares]
reservation = "spares"
[engine]
address = "ctl:7878"
mode = "act"
[security]
user_may = ["every", "lead", "every"]
"""


def site(tmp_path: Path, text: str) -> config.Site:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return config.load({}, str(path))


def faults(tmp_path: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        site(tmp_path, text)
    assert caught.value.exit_code == EXIT_CONFIG
    assert all(fault.startswith(str(tmp_path / "site.toml")) for fault in caught.value.faults)
    return caught.value.faults


def test_everything_is_read_into_units(tmp_path: Path) -> None:
    made = site(tmp_path, FULL)
    assert made.burst_buffer == config.BurstBuffer(root="/local/slurm-resil", all_jobs=True, log="/var/log/hooks.jsonl")
    assert made.prefix == config.Prefix(
        root="/scratch/{user}/runs",
        keep_last=3,
        keep_every=10000,
        keep_interval_s=21600.0,
        keep_best=Best(metric="accuracy", largest=True),
    )
    assert site(tmp_path, '[prefix]\nkeep_last = "all"').prefix.keep_last == ALL
    assert made.schedule == config.Schedule(lead_s=90.0, every=500, interval_s=5400.0)
    sources = (Source(kind="feature", argument="rack=(.+)"), Source(kind="file", argument="/etc/groups.toml"))
    scheme = Protection.parse("xor,rs:2/10,drain/5")
    assert made.redundancy == config.Redundancy(scheme=scheme, set_size=6, failure_groups=sources)
    assert made.drain.cap_bytes_s == 2e9
    assert made.drain.retry_s == 300.0
    assert dict(made.drain.hints) == {"striping_factor": "8", "romio_cb_write": "enable"}
    assert (made.drain.buffer_bytes, made.drain.gather) == (32 << 20, False)
    assert made.requeue == config.Requeue(max_restarts=0, max_idle_attempts=7)
    assert made.spares.reservation == "spares"
    assert (made.engine.address, made.engine.mode) == ("ctl:7878", "act")
    assert made.security.user_may == ("every", "lead")


def test_every_value_knows_its_source(tmp_path: Path) -> None:
    made = site(tmp_path, '[schedule]\nlead = "90s"\n')
    assert made.source("schedule", "lead") == f"{tmp_path}/site.toml [schedule] lead"
    assert made.source("schedule", "every") == "default"


def test_without_a_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", str(tmp_path / "none.toml"))
    assert config.load({}) == config.Site()
    assert site(tmp_path, "").burst_buffer == config.BurstBuffer()


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    for env, path in (({}, str(tmp_path / "a")), ({config.PATH_VARIABLE: str(tmp_path / "a")}, None)):
        with pytest.raises(ConfigError, match="does not exist") as caught:
            config.load(env, path)
        assert str(tmp_path / "a") in str(caught.value)


def test_the_variable_names_the_file_and_the_option_wins(tmp_path: Path) -> None:
    for name, every in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(f"[schedule]\nevery = {every}\n")
    env = {config.PATH_VARIABLE: str(tmp_path / "a")}
    assert config.load(env).schedule.every == 1
    assert config.load(env, str(tmp_path / "b")).schedule.every == 2


@pytest.mark.parametrize(
    ("text", "key", "read"),
    [
        ("[burst_buffer]\nroot = 5", "root", "5"),
        ('[burst_buffer]\nroot = "local"', "root", "'local'"),
        ('[burst_buffer]\nroot = "/"', "root", "'/'"),
        ('[burst_buffer]\nroot = "/local/{user}"', "root", "{user}"),
        ('[burst_buffer]\nroot = "/local\\n/x"', "root", "'/local\\n/x'"),
        ('[burst_buffer]\nall_jobs = "yes"', "all_jobs", "'yes'"),
        ('[prefix]\nroot = "/scratch/{home}"', "root", "{home}"),
        ("[prefix]\nroot = []", "root", "[]"),
        ("[schedule]\nlead = 90", "lead", "90"),
        ('[schedule]\nlead = "90"', "lead", "'90'"),
        ('[schedule]\nlead = "0s"', "lead", "'0s'"),
        ('[schedule]\ninterval = "ten minutes"', "interval", "'ten minutes'"),
        ("[schedule]\nevery = 0", "every", "0"),
        ("[schedule]\nevery = true", "every", "True"),
        ("[schedule]\nevery = 1.5", "every", "1.5"),
        ("[prefix]\nkeep_last = 0", "keep_last", "0"),
        ('[prefix]\nkeep_last = "some"', "keep_last", "'some'"),
        ("[prefix]\nkeep_every = true", "keep_every", "True"),
        ("[prefix]\nkeep_interval = 60", "keep_interval", "60"),
        ('[prefix]\nkeep_best = "loss"', "keep_best", "'loss'"),
        ("[prefix]\nkeep_best = 1", "keep_best", "1"),
        ('[redundancy]\nscheme = "raid"', "scheme", "'raid' is no redundancy scheme"),
        ("[redundancy]\nscheme = 5", "scheme", "5"),
        ('[redundancy]\nscheme = "rs:2,xor/10"', "scheme", "never comes to be"),
        ("[redundancy]\nset_size = 1", "set_size", "1"),
        ("[redundancy]\nset_size = 129", "set_size", "129"),
        ('[redundancy]\nset_size = "8"', "set_size", "'8'"),
        ('[redundancy]\nfailure_groups = "rack"', "failure_groups", "'rack'"),
        ("[redundancy]\nfailure_groups = []", "failure_groups", "[]"),
        ('[redundancy]\nfailure_groups = ["none", "topology"]', "failure_groups", "stand alone"),
        ('[redundancy]\nfailure_groups = "file:groups.toml"', "failure_groups", "absolute"),
        ('[redundancy]\nfailure_groups = "file:/a.txt"', "failure_groups", ".toml"),
        ('[redundancy]\nfailure_groups = "feature:rack=("', "failure_groups", "no pattern"),
        ('[redundancy]\nfailure_groups = "feature:rack=.+"', "failure_groups", "in parentheses"),
        ('[redundancy]\nfailure_groups = "topology:a b"', "failure_groups", "'a b'"),
        ("[drain]\ncap = 2000", "cap", "2000"),
        ('[drain]\ncap = "2GB"', "cap", "'2GB'"),
        ('[drain]\ncap = "2XB/s"', "cap", "'2XB/s'"),
        ('[drain]\ncap = "0/s"', "cap", "'0/s'"),
        ('[drain]\nbuffer = "10"', "buffer", "'10'"),
        ("[drain]\nbuffer = 64", "buffer", "64"),
        ('[drain]\nbuffer = "2GiB"', "buffer", "'2GiB'"),
        ('[drain]\ngather = "no"', "gather", "'no'"),
        ('[drain]\nhints = "a=b"', "hints", "'a=b'"),
        ("[drain]\nhints = { a = true }", "hints", "True"),
        ('[drain]\nhints = { "a b" = 1 }', "hints", "a b"),
        ("[drain]\nhints = { cb_nodes = 0 }", "hints", "a whole number from 1"),
        ('[drain]\nhints = { romio_ds_write = "no" }', "hints", "enable, disable, automatic"),
        ("[drain]\nretry = 60", "retry", "60"),
        ('[drain]\nretry = "2y"', "retry", "'2y'"),
        ("[requeue]\nmax_restarts = -1", "max_restarts", "-1"),
        ("[requeue]\nmax_idle_attempts = 0", "max_idle_attempts", "0"),
        ('[spares]\nreservation = "a b"', "reservation", "'a b'"),
        ('[engine]\naddress = "ctl"', "address", "'ctl'"),
        ('[engine]\naddress = "ctl:70000"', "address", "'ctl:70000'"),
        ('[engine]\nmode = "on"', "mode", "'on'"),
        ('[security]\nuser_may = "every"', "user_may", "'every'"),
        ('[security]\nuser_may = ["root"]', "user_may", "'root'"),
    ],
)
def test_one_wrong_value_is_one_fault_with_key_value_and_example(
    tmp_path: Path, text: str, key: str, read: str
) -> None:
    (fault,) = faults(tmp_path, text)
    section = text[1:].partition("]")[0]
    assert f"[{section}] {key} is " in fault
    assert read in fault
    assert fault.endswith(f"as in {key} = {config.keys(section)[key].metadata['example']}")


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = 'top = 1\n[burst]\n[schedule]\nlead = 5\nevry = 3\n[engine]\nmode = "act"\n'
    found = faults(tmp_path, text)
    assert len(found) == 5
    for part in ("[top] is unknown", "[burst] is unknown", "lead is 5", "evry is unknown; keys are lead, every", "act"):
        assert any(part in fault for fault in found), part


@pytest.mark.parametrize(
    "text",
    [
        '[burst_buffer]\nroot = "/a"\n[prefix]\nroot = "/a/b"',
        '[burst_buffer]\nroot = "/a/b"\n[prefix]\nroot = "/a"',
        "[burst_buffer]\nall_jobs = true",
        '[redundancy]\nscheme = "rs:3"\nset_size = 3',
        '[redundancy]\nscheme = "xor,rs/10"\nset_size = 2',
        '[engine]\nmode = "act"',
        '[spares]\nreservation = "spares"',
    ],
)
def test_contradictions(tmp_path: Path, text: str) -> None:
    (fault,) = faults(tmp_path, text)
    assert "as in" in fault


def test_a_section_that_is_a_value(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "schedule = 3")
    assert "schedule is 3, a section is needed, as in [schedule]" in fault


def test_a_value_that_is_wrong_is_not_missing_too(tmp_path: Path) -> None:
    assert len(faults(tmp_path, '[engine]\naddress = "x"\nmode = "act"\n[spares]\nreservation = "s"')) == 1


def test_every_example_is_valid(tmp_path: Path) -> None:
    lines = []
    for section in (
        "burst_buffer",
        "prefix",
        "schedule",
        "redundancy",
        "drain",
        "requeue",
        "spares",
        "engine",
        "security",
    ):
        lines.append(f"[{section}]")
        lines += [f"{key} = {field.metadata['example']}" for key, field in config.keys(section).items()]
    made = site(tmp_path, "\n".join(lines))
    assert made.schedule.lead_s == 90


@pytest.mark.parametrize(
    ("raw", "where", "shown"),
    [
        (b"[drain]\ncap = 1GB/s\n", "line 2", "cap = 1GB/s"),
        (b"[drain]\n\n[drain\n", "line 3", "[drain"),
        (b"[burst_buffer\n", "line 1", "[burst_buffer"),
        (b"\xff\xfe", "line 1", "it is not UTF-8"),
        (b'a = "\n', "line 1", "a ="),
        (b"[drain]\n\n# \xff\n", "line 3", "it is not UTF-8"),
        (b'[drain]\ncap = "1GB/s', "line 2", 'cap = "1GB/s'),
    ],
)
def test_what_is_no_toml_is_told_with_its_line_and_a_mend(tmp_path: Path, raw: bytes, where: str, shown: str) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="is not TOML") as caught:
        config.load({}, str(path))
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}, {where}: ") and shown in fault
    assert "in quotes" in caught.value.mend


def test_a_directory_is_told_with_the_file_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({"SLURM_RESIL_SITE": str(tmp_path)})
    assert str(caught.value).startswith(f"{tmp_path} is a directory") and f"{tmp_path}/site.toml" in caught.value.mend
