"""What ``[redundancy] scheme`` and ``failure_groups`` may say, and what they mean."""

from __future__ import annotations

import pytest

from slurm_resil.core.errors import UsageError
from slurm_resil.core.failure_groups import Source
from slurm_resil.core.protection import AUTO, Protection, contradiction


@pytest.mark.parametrize(
    ("text", "short", "first", "second"),
    [
        ("xor", "xor", "xor", "xor"),
        (" XOR ", "xor", "xor", "xor"),
        ("rs:3", "rs:3", "rs:3", "rs:3"),
        ("single", "single", "single", "single"),
        ("xor, rs:2 every 10", "xor,rs/10", "rs", "xor"),
        ("xor,rs:3/10,drain/20", "xor,rs:3/10,drain/20", "rs:3", "xor"),
        ("rs:3 / 4", "rs:3/4", "rs:3", "single"),
        ("single,partner:2/2", "single,partner:2/2", "partner:2", "single"),
        ("auto", "auto", "xor", "xor"),
        ("drain every 3", "auto,drain/3", "xor", "xor"),
        ("auto,drain/3", "auto,drain/3", "xor", "xor"),
    ],
)
def test_a_list_is_read_and_written(text: str, short: str, first: str, second: str) -> None:
    made = Protection.parse(text)
    assert str(made) == short
    assert Protection.parse(short) == made
    assert (str(made.scheme(0)), str(made.scheme(1))) == (first, second)
    assert made.auto is (AUTO in short)
    assert made.protects is (first != "single")


def test_the_strongest_that_is_due_counts_and_the_first_of_an_attempt_is_strong_and_drained() -> None:
    made = Protection.parse("xor,rs:2/4,rs:3/6,drain/5")
    assert [str(made.scheme(number)) for number in range(13)] == [
        *("rs:3", "xor", "xor", "xor", "rs", "xor", "rs:3", "xor", "rs", "xor", "xor", "xor", "rs:3")
    ]
    assert [number for number in range(11) if made.drained(number)] == [0, 5, 10]
    assert (str(made.strongest), str(made.usual)) == ("rs:3", "xor")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no redundancy scheme"),
        ("raid5", "is no redundancy scheme"),
        ("xor,", "'' is no redundancy scheme"),
        ("xor 10", "'xor 10' is no redundancy scheme"),
        ("xor/", "'xor/' is no redundancy scheme"),
        ("xor every", "'xor every' is no redundancy scheme"),
        ("xor:2", "xor takes no number"),
        ("rs:99", "the number of losses"),
        ("rs/0", "every 0 checkpoints"),
        ("rs/10000000", "every 10000000 checkpoints"),
        ("auto,rs/10", "another one is named"),
        ("drain/2,drain/3", "says something twice"),
        ("xor,xor", "never comes to be"),
        ("xor,partner", "never comes to be"),
        ("rs:2,xor/10", "xor for one in 10 never comes to be, rs for one in 1 does"),
        ("xor/4,rs/2", "never comes to be"),
        ("xor,single/3", "never comes to be"),
    ],
)
def test_what_makes_no_sense_is_told_with_what_would(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Protection.parse(text)
    assert said in caught.value.message and repr(text) in caught.value.message
    assert "as in" in caught.value.mend


def test_a_set_holds_one_node_more_than_it_may_lose() -> None:
    assert contradiction(Protection.parse("xor,rs:3/10"), 3).startswith(
        "scheme is 'xor,rs:3/10' and set_size is 3: rs:3"
    )
    assert contradiction(Protection.parse("rs:3"), 4) == contradiction(Protection.parse("rs:3"), None) == ""


@pytest.mark.parametrize(
    "text", ["auto", "none", "topology", "topology:ib", "feature:rack=(.+)", "feature:(r[0-9]+)", "file:/etc/a.toml"]
)
def test_a_source_of_failure_groups(text: str) -> None:
    assert str(Source.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no source"),
        ("auto:x", "no source"),
        ("slurm", "no source"),
        ("topology:", "no name"),
        ("topology:a/b", "no name"),
        ("feature:", "in parentheses"),
        ("feature:rack", "in parentheses"),
        ("feature:(r)(c)", "has 2"),
        ("feature:r(", "no pattern"),
        ("file:a.toml", "absolute"),
        ("file:/a", ".toml"),
    ],
)
def test_no_source(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Source.parse(text)
    assert said in caught.value.message and "feature:rack=(.+)" in caught.value.mend
