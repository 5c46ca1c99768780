"""Partial, lenient and converting restores; nothing of what they leave out goes without a word."""

from __future__ import annotations

import fnmatch
import logging
import random

import ckptworld as w
import numpy as np
import pytest
import torch
from torch import nn

from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.core.errors import DataError, StateError, UsageError

pytestmark = pytest.mark.torch


@pytest.fixture(params=["local", "drained"])
def stored(tmp_path, request):
    """Save a state; gives what restores it with options."""
    job, run = w.job(tmp_path), str(tmp_path / "r1")

    def save(state):
        w.save_new(job, state)
        if request.param == "drained":
            w.drain(job, run)

        def load(other, **options):
            chosen = LoadOptions(**options)
            if request.param == "drained":
                return w.load_drained(run, other, 0, 1, options=chosen).report
            return w.load(job, other, options=chosen).report

        return load

    return save


def parts(state) -> dict[str, object]:
    return {key: w.bits(value) for key, value in state.items()}


def taken(before, after, source) -> set[str]:
    """Which parts came from the checkpoint; the others must be as they were."""
    found = set()
    for key, now in parts(after).items():
        if now == source[key]:
            found.add(key)
        else:
            assert now == before[key], key
    return found


@pytest.mark.parametrize(
    ("options", "came"),
    [
        ({"include": "model"}, {"model"}),
        ({"include": ["model/*", "position"]}, {"model", "position"}),
        ({"include": "[mn]*"}, {"model", "numpy"}),
        ({"exclude": ("optimizer", "schedule")}, {"model", "generator", "numpy", "python", "position"}),
        ({"include": "*", "exclude": "*"}, set()),
    ],
    ids=str,
)
def test_what_is_taken_and_what_stays(stored, options, came, caplog):
    state, other = w.training(1, 2), w.training(2, 1)
    load, source, before = stored(state), parts(state), parts(other)
    report = load(other, **options)
    assert taken(before, other, source) == came
    assert set(report.skipped) == set(source) - came
    assert not (report.missing or report.unexpected or report.cast or report.kept)
    (record,) = [r for r in caplog.records if "was not restored as it stands" in r.message]
    assert record.levelno == logging.WARNING
    assert report.skipped[0] in record.message


def test_an_ordinary_restore_says_nothing(stored, caplog):
    other = w.training(2, 1)
    report = stored(w.training(1, 2))(other)
    assert not report
    assert str(report) == ""
    assert not caplog.records


def test_parts_of_a_module_and_of_an_optimizer(stored):
    state, other = w.training(1, 2), w.training(2, 1)
    model, optimizer = other["model"], other["optimizer"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = optimizer.state[model.middle.weight]
    kept_bits = w.bits(kept)
    load = stored(state)
    optimizer.param_groups[0]["lr"] = 0.5
    report = load(
        other,
        include=["model/norm.*", "optimizer"],
        exclude=["optimizer/state/model/middle.*", "optimizer/groups/0/lr"],
    )
    for name, value in model.state_dict().items():
        want = state["model"].state_dict()[name] if name.startswith("norm.") else before[name]
        assert torch.equal(value, want), name
    for name, parameter in model.named_parameters():
        want = kept_bits if name == "middle.weight" else w.bits(state["optimizer"].state[_of(state, name)])
        if name != "middle.bias":
            assert w.bits(optimizer.state[parameter]) == want
    assert optimizer.state[model.middle.weight] is kept
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert set(report.skipped) >= {"model/token.weight", "optimizer/groups/0/lr", "schedule"}
    assert "optimizer/state/model/middle.weight" in report.skipped
    assert "model" not in report.skipped


def _of(state, name):
    return dict(state["model"].named_parameters())[name]


def test_parts_of_plain_containers(stored):
    def make(n):
        return {"d": {"a": n, "b": [n, (n, torch.tensor(n))], 3: {"x": n}, "only": n}, "a/b": n, "t": torch.tensor(n)}

    other = make(2)
    del other["d"]["only"]
    other["d"]["mine"] = 2
    report = stored(make(1))(other, include=["d/b/1/*", "d/3", "a/b", "d/only"])
    assert other == {
        "d": {"a": 2, "b": [2, (1, torch.tensor(1))], 3: {"x": 1}, "mine": 2, "only": 1},
        "a/b": 1,
        "t": torch.tensor(2),
    }
    assert sorted(report.skipped) == ["d/a", "d/b/0", "d/mine", "t"]


@pytest.mark.parametrize("options", [{"include": ["model", "modle/*"]}, {"exclude": "optimiser"}], ids=str)
def test_a_pattern_that_matches_nothing_is_an_error(stored, options):
    other = w.training(2, 1)
    before = parts(other)
    load = stored(w.training(1, 2))
    with pytest.raises(StateError, match=r"the pattern '(modle/\*|optimiser)' matches nothing"):
        load(other, **options)
    assert parts(other) == before


@pytest.mark.parametrize("bad", ["", ("a", ""), (3,)])
def test_what_is_no_pattern(bad):
    with pytest.raises(UsageError, match="is no pattern"):
        LoadOptions(include=bad)


def test_leaving_out_half_of_what_is_tied_is_an_error(stored):
    other = w.training(2, 1)
    before = parts(other)
    load = stored(w.training(1, 2))
    with pytest.raises(
        StateError, match=r"model/head.weight: is left out, but is the same memory as model/token.weight"
    ):
        load(other, exclude="model/head.*")
    assert parts(other) == before
    load(other, exclude=["model/head.*", "model/token.*"])


def test_a_missing_and_an_unexpected_part(stored):
    """The head of another task: everything else comes, and each side's own is said."""
    state, other = w.training(1, 2), w.training(2, 1)
    state["model"].old = nn.Linear(2, 2)
    state["extra"] = torch.ones(3)
    load = stored(state)
    other["model"].new = nn.Linear(3, 3)
    other["mine"] = 4
    before, new = parts(other), w.bits(other["model"].new)
    faults = {
        "allow_missing": r"model/old.weight: is in the checkpoint, not in the state; .*extra: is in the checkpoint",
        "allow_unexpected": "model/new.weight: is in the state, not in the checkpoint; .*mine: is in the state",
    }
    for option, fault in faults.items():
        with pytest.raises(StateError, match=fault):
            load(other, **{option: True})
        assert parts(other) == before
    report = load(other, allow_missing=True, allow_unexpected=True)
    assert sorted(report.missing) == ["mine", "model/new.bias", "model/new.weight"]
    assert sorted(report.unexpected) == ["extra", "model/old.bias", "model/old.weight"]
    assert not report.skipped
    assert w.bits(other["model"].new) == new
    assert other["mine"] == 4
    assert torch.equal(other["model"].middle.weight, state["model"].middle.weight)
    assert w.bits(other["optimizer"].state[other["model"].middle.weight]) == w.bits(
        state["optimizer"].state[state["model"].middle.weight]
    )


def test_lenient_is_not_blind(stored):
    """Shapes, types and kinds still have to agree."""
    load = stored(w.training(1, 2))
    for change in (
        lambda s: setattr(s["model"], "middle", nn.Linear(8, 9)),
        lambda s: s["model"].double(),
        lambda s: s.update(position=torch.zeros(2)),
    ):
        other = w.training(2, 1)
        change(other)
        before = parts(other)
        with pytest.raises(StateError, match="does not fit"):
            load(other, allow_missing=True, allow_unexpected=True)
        assert parts(other) == before


def test_what_is_left_out_is_not_compared_nor_read(tmp_path):
    job = w.job(tmp_path)
    manifest = w.save_new(job, {"a": torch.ones(1000), "b": torch.ones(3)})
    (a,) = (item for item in manifest.items if item.name == "a")
    from slurm_resil.core import paths

    w.flip(paths.slot(job, 0, 0), a.offset)
    other = {"a": nn.Linear(2, 2), "b": torch.zeros(3)}
    restored = w.load(job, other, options=LoadOptions(exclude="a"))
    assert restored.wanted_bytes == 12
    with pytest.raises(DataError):
        w.load(job, {"a": torch.ones(1000), "b": torch.zeros(3)}, options=LoadOptions(include="a"))


# conversions


def as_type(dtype):
    def build(seed: int):
        state = w.training(seed, 0)
        state["model"].to(dtype)
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.01)
        state["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], T_max=50)
        return state

    return build


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("stored_type", "live_type"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_conversion_has_to_be_asked_for(stored, stored_type, live_type, steps):
    state, other = as_type(stored_type)(1), as_type(live_type)(2)
    w.train(state, 2)
    w.train(other, steps)
    before = parts(other)
    load = stored(state)
    with pytest.raises(StateError, match=f"model/token.weight: {stored_type} in the checkpoint, {live_type} in the st"):
        load(other)
    assert parts(other) == before
    report = load(other, cast=True)
    assert f"model/token.weight ({stored_type} to {live_type})" in report.cast
    names = dict(state["model"].named_parameters())
    for name, parameter in other["model"].named_parameters():
        assert parameter.dtype == live_type
        assert torch.equal(parameter, names[name].to(live_type))
        for key, value in state["optimizer"].state[names[name]].items():
            now = other["optimizer"].state[parameter][key]
            want = value if key == "step" else value.to(live_type)
            assert now.dtype == want.dtype
            assert torch.equal(now, want)
    w.train(other, 2)


def test_masters_of_another_precision_stay_what_they_are(stored):
    """State that was kept more exactly than its parameter is not cut down to it."""

    def build(dtype):
        model = nn.Linear(3, 3).to(dtype)
        return {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}

    state, other = build(torch.bfloat16), build(torch.float16)
    for parameter in state["m"].parameters():
        state["o"].state[parameter]["master"] = torch.rand(parameter.shape)
    stored(state)(other, cast=True)
    for one, two in zip(state["m"].parameters(), other["m"].parameters(), strict=True):
        assert w.bits(other["o"].state[two]) == w.bits(state["o"].state[one])


class Box:
    def __init__(self, **value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def test_conversion_of_other_things(stored):
    def make(n, real, imaginary, array, whole):
        return {
            "e": torch.tensor([n / 2, 9], dtype=real)[:1].expand(40),
            "dense": torch.full((2,), n / 2, dtype=real),
            "c": torch.full((1,), n, dtype=imaginary),
            "a": np.array([n / 2], array),
            "box": Box(deep=[{"t": torch.tensor([n / 2], dtype=real)}], n=n),
            "i": torch.tensor([n], dtype=whole),
        }

    state = make(3, torch.float32, torch.complex64, np.float64, torch.int32)
    state["dense"] = state["dense"][:1].expand(2)
    load = stored(state)
    other = make(5, torch.float16, torch.complex128, np.float32, torch.int32)
    report = load(other, cast=True)
    assert w.bits(other) == w.bits(make(3, torch.float16, torch.complex128, np.float32, torch.int32))
    assert [text.split()[0] for text in report.cast] == ["e", "dense", "c", "a", "box/deep/0/t"]
    with pytest.raises(StateError, match=r"i: torch.int32 in the checkpoint, torch.int64 in the state"):
        load(make(5, torch.float32, torch.complex64, np.float64, torch.int64), cast=True)
    with pytest.raises(StateError, match=r"c: torch.complex64 in the checkpoint, torch.float32 in the state"):
        load(make(5, torch.float32, torch.float32, np.float64, torch.int32), cast=True)


def tree(n: float) -> dict:
    """All kinds of containers; the same shape for every n."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=n, momentum=0.5)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(n)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, n)
    inner = {"list": [n, [n, {"t": torch.tensor(n)}]], "tuple": (n, torch.tensor(n)), "plain": {"x": n, 3: n}}
    return {"m": model, "o": optimizer, "d": inner, "box": Box(n=n), "n": n, "g": torch.Generator().manual_seed(int(n))}


def leaves_of(state: dict) -> dict[str, object]:
    """Everything that can be loaded alone, by the paths that the documentation promises."""
    found = {f"m/{name}": value for name, value in state["m"].state_dict().items()}
    for name, parameter in state["m"].named_parameters():
        found[f"o/state/m/{name}"] = state["o"].state[parameter]["momentum_buffer"]
    found |= {f"o/groups/0/{key}": value for key, value in state["o"].param_groups[0].items() if key != "params"}
    inner = state["d"]
    found |= {"d/list/0": inner["list"][0], "d/list/1/0": inner["list"][1][0], "d/list/1/1/t": inner["list"][1][1]["t"]}
    found |= {"d/tuple/0": inner["tuple"][0], "d/tuple/1": inner["tuple"][1]}
    found |= {"d/plain/x": inner["plain"]["x"], "d/plain/3": inner["plain"][3]}
    return found | {"box": state["box"].value, "n": state["n"], "g": state["g"]}


@pytest.mark.parametrize("seed", range(30))
def test_any_patterns_take_what_they_say(tmp_path, seed):
    rng = random.Random(seed)
    job = w.job(tmp_path)
    state = tree(1.0)
    w.save_new(job, state)
    paths = list(leaves_of(state))

    def pattern() -> str:
        parts = rng.choice(paths).split("/")
        parts = parts[: rng.randint(1, len(parts))]
        return "/".join(rng.choice([part, part, "*", f"{part[0]}*"]) for part in parts)

    include = [pattern() for _ in range(rng.randint(0, 3))]
    exclude = [pattern() for _ in range(rng.randint(0, 2))]

    def below(path: str, patterns: list[str]) -> bool:
        parts = path.split("/")
        above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        return any(fnmatch.fnmatchcase(one, each) for one in above for each in patterns)

    other = tree(2.0)
    report = w.load(job, other, options=LoadOptions(include=include, exclude=exclude)).report
    want = {path for path in paths if (not include or below(path, include)) and not below(path, exclude)}
    source, before, now = (leaves_of(one) for one in (state, tree(2.0), other))
    for path in paths:
        assert w.bits(now[path]) == w.bits((source if path in want else before)[path]), (path, include, exclude)
    assert all(below(path, report.skipped) for path in paths if path not in want)
    assert not any(below(path, report.skipped) for path in want)
