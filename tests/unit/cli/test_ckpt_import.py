"""``ckpt import`` as a user calls it: what torch, DCP and safetensors have written, restored into live objects."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

sys.path.insert(0, str(Path(__file__).parent))

from command import ckpt

from slurm_resil.catalog import RunCatalog
from slurm_resil.ckpt.options import LoadOptions
from slurm_resil.ckpt.restore import restore_drained
from slurm_resil.core import paths

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
AS = ("--as", "model", "--as", "optimizer:AdamW=optim", "--as", "epoch")


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(2):
        hidden = model[1](model[0](torch.randn(5, 4)))
        model[2](hidden.bfloat16()).float().square().sum().backward()
        optimizer.step()
    return model, optimizer


def write(kind: str, where: Path, model, optimizer) -> str:
    path = str(where / f"source.{kind}")
    if kind == "pt":  # its optimizer numbers the parameters
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}, path)
    else:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state, "epoch": 3}, checkpoint_id=path, no_dist=True)
    return path


def bring(source: str, run: Path, *arguments: str, iteration: int = 7):
    return ckpt("import", str(iteration), source, "--run-dir", str(run), *arguments)


def same(one, other) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_training_goes_on_from_it_bit_for_bit(tmp_path, kind):
    model, optimizer = trained(1)
    done = bring(write(kind, tmp_path, model, optimizer), tmp_path / "run", *AS, "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["state"] == {"model": "module", "optimizer": "optimizer", "epoch": "value"}
    other, live = trained(2)
    state = {"model": other, "optimizer": live, "epoch": 0}
    run = str(tmp_path / "run")
    restore_drained(state, run, RunCatalog(run, run_id="run").load(7), rank=0, world_size=1)
    assert same(model, other) and state["epoch"] == 3
    old, new = optimizer.state_dict(), live.state_dict()
    assert old["param_groups"] == new["param_groups"]
    for number, entries in old["state"].items():
        assert all(torch.equal(value, new["state"][number][key]) for key, value in entries.items())
    assert ckpt("verify", "7", "--run-dir", run).returncode == 0
    assert sorted(os.listdir(run)) == ["ckpt-0000000007.h5", "ckpt-0000000007.json"]  # the copy is gone
    assert bring(str(tmp_path / f"source.{kind}"), tmp_path / "run", *AS).returncode == 2  # there already


def test_what_was_exported_comes_back(tmp_path):
    model, optimizer = trained(1)
    run = tmp_path / "run"
    assert bring(write("pt", tmp_path, model, optimizer), run, *AS).returncode == 0
    (tmp_path / "hf").mkdir()
    file = str(tmp_path / "hf" / "model.safetensors")
    arguments = ("--only", "model/*", "--strip", "model/", "--max-shard-size", "60")
    assert ckpt("export", "7", file, "--run-dir", str(run), *arguments).returncode == 0
    done = bring(str(tmp_path / "hf"), run, iteration=8)  # the index, and the module by itself
    assert done.returncode == 0, done.stderr
    other, live = trained(2)
    options = LoadOptions(include="model")
    state = {"model": other, "optimizer": live}
    restore_drained(state, str(run), RunCatalog(str(run)).load(8), rank=0, world_size=1, options=options)
    assert same(model, other)


def test_safetensors_of_its_own_library_with_tied_weights(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {"wte.weight": torch.randn(5, 4), "norm.weight": torch.randn(4).to(torch.float8_e4m3fn)}
    save_file(weights, tmp_path / "w.safetensors")
    source = str(tmp_path / "w.safetensors")
    done = bring(source, tmp_path / "run", "--tie", "model/head.weight=model/wte.weight")
    assert done.returncode == 0, done.stderr

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.norm = torch.nn.Embedding(5, 4), torch.nn.Module()
            self.norm.register_buffer("weight", torch.zeros(4).to(torch.float8_e4m3fn))
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.wte.weight

    model = Tied()
    run = str(tmp_path / "run")
    restore_drained({"model": model}, run, RunCatalog(run).load(7), rank=0, world_size=1)
    assert torch.equal(model.wte.weight, weights["wte.weight"]) and model.head.weight is model.wte.weight
    assert torch.equal(model.norm.weight.view(torch.uint8), weights["norm.weight"].view(torch.uint8))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_code_in_a_source_is_run(tmp_path):
    mark = tmp_path / "mark"
    torch.save({"model": {"w": torch.ones(2)}, "config": Evil(mark)}, tmp_path / "evil.pt")
    done = bring(str(tmp_path / "evil.pt"), tmp_path / "run")
    assert done.returncode == 65 and "mkdir" in done.stderr and "evil.pt" in done.stderr
    source = Path(write("dcp", tmp_path, *trained(1)))
    (source / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    done = bring(str(source), tmp_path / "run", *AS)
    assert done.returncode == 65 and "mkdir" in done.stderr and ".metadata" in done.stderr
    (source / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.")
    assert bring(str(source), tmp_path / "run", *AS).returncode == 65
    assert not mark.exists() and not (tmp_path / "run").exists()


def test_a_flipped_byte_is_found_where_torch_finds_none(tmp_path):
    model, optimizer = trained(1)
    raw = model.state_dict()["0.weight"].numpy().tobytes()
    for kind in ("pt", "dcp"):
        source = Path(write(kind, tmp_path, model, optimizer))
        path = source if kind == "pt" else source / "__0_0.distcp"
        data = bytearray(path.read_bytes())
        data[data.index(raw)] ^= 1
        path.write_bytes(data)
        done = bring(str(source), tmp_path / "run", *AS)
        assert done.returncode == 65 and "does not match its checksum" in done.stderr, (kind, done.stderr)
        assert path.name in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--as", "optimizer=optim"), "does not say of what class"),
        (("--as", "model=nowhere"), "nothing at 'nowhere'; at its top there are: epoch, model, optim"),
        (("--as", "optimizer:AdamW=optim"), "no module"),
        (("--as", "=model"), "is not KEY[:KIND][=PLACE]"),
        (("--as", "model", "--tie", "model/a=model/b"), "there is no tensor model/b"),
        (("--as", "epoch:AdamW"), "no state dict of an optimizer"),
    ],
)
def test_what_cannot_be_mapped_is_told_and_leaves_nothing(tmp_path, arguments, words):
    done = bring(write("pt", tmp_path, *trained(1)), tmp_path / "run", *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_numbered_parameters_are_never_guessed(tmp_path):
    """A buffer that no layer of torch has makes the count another one."""
    model, optimizer = trained(1)
    torch.save(
        {"model": {"mask": torch.ones(3), **model.state_dict()}, "optim": optimizer.state_dict()}, tmp_path / "x"
    )
    done = bring(str(tmp_path / "x"), tmp_path / "run", "--as", "model", "--as", "optimizer:AdamW=optim")
    assert done.returncode == 2 and "numbers its 6 parameters" in done.stderr


ODD = {
    "a/b/c": torch.arange(6.0).reshape(2, 3),
    "a%2Fb": torch.ones(2),
    "ünï/日本": torch.tensor(3.5),
    "..": torch.ones(1),
    "": torch.ones(1),
    "%": torch.zeros(1),
    "new\nline": torch.ones(1).half(),
    "empty": torch.empty(0),
    "none": torch.empty(3, 0, 2, dtype=torch.float64),
    "bf16": torch.randn(5, 5).bfloat16(),
    "f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "f8b": torch.randn(4, 4).to(torch.float8_e5m2),
    "bool": torch.tensor([True, False]),
    "repeated": torch.arange(3.0).bfloat16().expand(4, 3),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
}


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_odd_names_and_types_go_through_import_and_export_as_they_are(tmp_path, kind):
    source = str(tmp_path / f"odd.{kind}")
    if kind == "pt":
        torch.save(ODD, source)
    else:
        save_file({name: tensor.contiguous() for name, tensor in ODD.items()}, source)
    run = tmp_path / "run"
    done = bring(source, run)
    assert done.returncode == 0, done.stderr
    for ending in ("pt", "safetensors"):
        out = str(tmp_path / f"out.{ending}")
        argv = ("export", "7", out, "--run-dir", str(run), "--only", "model/*", "--strip", "model/")
        done = ckpt(*argv)
        assert done.returncode == 0, done.stderr
        got = torch.load(out, weights_only=True) if ending == "pt" else load_file(out)
        assert got.keys() == ODD.keys()
        for name, tensor in ODD.items():
            assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
            assert raw(got[name]) == raw(tensor), name
    done = ckpt("diff", paths.drained(str(run), 7), out, "--strip", "model/", "--tolerance", "0", "--json")
    same_ones = len(ODD) - (kind == "pt")  # what is repeated is in the drained file once
    assert json.loads(done.stdout)["counts"]["same"] == same_ones, done.stdout


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.mark.parametrize("text", [b"", b"junk" * 50, b"PK\x03\x04 and no more", b"\x80\x02}."])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path, text, ending):
    (tmp_path / f"source.{ending}").write_bytes(text)
    done = bring(str(tmp_path / f"source.{ending}"), tmp_path / "run", "--json")
    assert done.returncode in (2, 65) and "Traceback" not in done.stderr
    assert f"source.{ending}" in json.loads(done.stdout)["error"]
    assert not (tmp_path / "run").exists()  # it was made for this


@pytest.mark.parametrize("cut", [4, 200, -1])
def test_what_is_cut_off_is_said_to_be(tmp_path, cut):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(64)}, tmp_path / "w.safetensors")
    torch.save({"w": torch.ones(64)}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:cut])
        done = bring(str(path), tmp_path / "run")
        assert done.returncode == 65 and name in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert zipfile.is_zipfile(tmp_path / "w.pt") is False
