"""Hooks start about as fast as the interpreter: what they read is read without json, and nothing slow is loaded."""

import json
import subprocess

import pytest

from slurm_resil.bench.hooks import measure
from slurm_resil.hooks import base
from slurm_resil.hooks.command import command
from slurm_resil.hooks.epilog import _number


@pytest.mark.parametrize(
    "value",
    [
        {"bb_root": "/local"},
        {"bb_root": "/local/a b", "always": True, "log": ""},
        {"always": False, "bb_root": "/l,{}:ö"},
        {"always": True},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_what_render_writes_is_read_as_json_reads_it(value: dict[str, object], indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert base._flat(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '"a"',
        "{",
        '{"a"}',
        '{"a":}',
        '{"a": }',
        '{"a" "b"}',
        '{"a": "b"',
        '{"a": "b",}',
        '{"a": "b"} x',
        '{"a": "b" "c": "d"}',
        '{"a": "b", "c"}',
        '{"a": "b", "c": nul}',
        '{"a": null}',
        '{"a": 5}',
        '{"a": ["b"]}',
        '{"a": {"b": "c"}}',
        '{"a": "\\u0041"}',
        '{"a": "b\nc"}',
        '{"a": tr ue}',
        '{"a": true "b": "c"}',
        '{"a": "b}',
        '"a": "b"',
        '{"a": true}}',
    ],
)
def test_anything_else_is_left_to_json(text: str) -> None:
    assert base._flat(text) is None


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("0000000005-000001.json", 5),
        ("10000000005-000001.json", 10_000_000_005),
        ("000000005-000001.json", None),
        ("0000000005-00000x.json", None),
        ("0000000005-0000²1.json", None),
        ("0000000005.json", None),
        ("0000000005-000001-1.json", None),
        ("0000000005-000001", None),
    ],
)
def test_names_of_manifests(name: str, number: int | None) -> None:
    assert _number(name, 2) == number


def test_digits_are_plain_ones() -> None:
    for value in ("٣", "²", "1_0", " 1"):
        with pytest.raises(base.HookError):
            base.number({"A": value}, "A")


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_nothing_that_takes_time_is_loaded(name: str) -> None:
    argv = command(name, "/nowhere")
    argv[4] = argv[4].partition("; sys.exit")[0]
    argv[4] += "; import slurm_resil.core.rmtree; print(*sys.modules)"
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert f"slurm_resil.hooks.{name}" in loaded
    assert loaded & {"json", "re", "enum", "typing", "contextlib", "runpy", "dataclasses", "pathlib", "socket"} == set()


def test_the_benchmark_tells_both_and_the_ratio() -> None:
    result = measure(repeats=1)
    assert (result.bench, result.repeats) == ("hooks", 1)
    assert {"prolog_ms", "epilog_ms", "python_ms"} <= set(result.figures)
    assert set(result.ratios) == {"prolog_over_python", "epilog_over_python"}
