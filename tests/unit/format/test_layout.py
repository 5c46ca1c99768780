from __future__ import annotations

import pytest

from slurm_resil.core.errors import UsageError
from slurm_resil.format import layout


def test_ordinary_names_stay_readable():
    assert layout.join("model", "blocks.0.weight") == "model/blocks.0.weight"
    assert layout.join("größe", "a b") == "größe/a b"


def test_every_key_has_a_name_of_its_own():
    keys = ["a", "a/b", "a%2Fb", "", "%", ".", "..", "...", "~", "~1", "1", 1, 1.0, True, None, (1, 2), "(1, 2)", b"1"]
    keys += ["x" * 5000, "x" * 5001, "x" * 5000 + "y", "\x00", "\n", "\ud800", "é", "e\u0301"]
    parts = [layout.encode_part(key) for key in keys]
    assert len(set(parts)) == len(keys)
    for part in parts:
        assert part
        assert "/" not in part and part not in (".", "..")
        assert len(part) <= layout.LONGEST_PART
        part.encode()  # no lone surrogate


def test_names_as_other_programs_know_them():
    keys = ["a/b", "ü/日本", "%", "", ".", "..", "~", "a%2Fb", "new\nline", "nul\0", "blocks.0.weight"]
    encoded = {layout.join("model", key): key for key in keys}
    assert layout.plain_names(encoded) == {name: f"model/{key}" for name, key in encoded.items()}
    # those that would be the same stay what they are, and so does what cannot be decoded
    names = [layout.join("a", "b"), layout.join("a/b"), layout.join(3), layout.join("x" * 2000), layout.join("\ud800")]
    assert layout.plain_names(names) == {name: name for name in names}
    names = ["%252F", "%2F", "a%2Fb", "a/b"]
    assert layout.plain_names(names) == {"%252F": "%2F", "%2F": "/", "a%2Fb": "a%2Fb", "a/b": "a/b"}


def test_names_in_the_file():
    assert layout.dataset_path("a/b") == "/state/a/b"
    assert layout.dataset_path("values", 3) == "/ranks/3/values"


SIZES = {
    "torch.bfloat16": 2,
    "torch.complex128": 16,
    "numpy.<f8": 8,
    "numpy.<U10": 40,
    "numpy.|V7": 7,
    "numpy.<M8[ns]": 8,
    "numpy.|b1": 1,
    "numpy.<f16": 16,
    "json": 1,
    "bytes": 1,
}


@pytest.mark.parametrize(("dtype", "size"), SIZES.items())
def test_sizes(dtype, size):
    assert layout.itemsize(dtype) == size
    assert layout.nbytes(dtype, (3, 5)) == 15 * size
    assert layout.nbytes(dtype, ()) == size
    assert layout.nbytes(dtype, (3, 0)) == 0


@pytest.mark.parametrize("dtype", ["torch.qint8", "numpy.O", "float32", ""])
def test_unknown_types_are_refused(dtype):
    with pytest.raises(UsageError, match="dtype"):
        layout.itemsize(dtype)
