"""FORMAT.md is right: a reader that knows nothing else reads what was written."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import ckptworld as w
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "format"))
import independent_reader as reader

from slurm_resil.core import paths
from slurm_resil.format.manifest import ShardManifest

pytestmark = pytest.mark.torch


def test_it_knows_nothing_of_the_package() -> None:
    source = Path(reader.__file__).read_text()
    names = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    names |= {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
    assert names == {"__future__", "json", "pathlib", "typing", "h5py", "numpy", "xxhash"}
    assert len(source.splitlines()) <= 75


@pytest.mark.parametrize("tier", ["slot", "drained"])
def test_it_reads_a_state(tmp_path: Path, tier: str) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).to(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "half": torch.randn(7).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "a/b": {"~": [1, 2.5, None, "ünï"]},
        "large": bytes(range(256)) * 20,
        "blocks": np.arange(3 << 19),  # three blocks
    }
    job = w.job(tmp_path)
    w.save_new(job, state)
    if tier == "slot":
        found = reader.shard(Path(job), 1, 0)
    else:
        w.drain(job, str(tmp_path / "r1"))
        found = reader.drained(tmp_path / "r1" / "ckpt-0000000001.h5", 0)
    for name, tensor in model.state_dict().items():
        assert np.array_equal(found["model"][name], tensor.numpy()), name
    moments = found["optimizer"]["state"]["model/0.weight"]
    assert np.array_equal(moments["exp_avg"], optimizer.state[model[0].weight]["exp_avg"].numpy())
    assert found["optimizer"]["groups"][0]["lr"] == 0.25
    assert np.array_equal(found["half"], state["half"].to(torch.float32).numpy())
    assert found["empty"].shape == (0, 4)
    assert np.array_equal(found["array"], state["array"])
    assert found["a/b"] == {"~": [1, 2.5, None, "ünï"]}
    assert found["large"] == state["large"]
    assert np.array_equal(found["blocks"], state["blocks"])
    with pytest.raises(AssertionError, match="blocks"):  # it looks at every block
        manifest = ShardManifest.load(paths.manifest(job, 1, 0))
        w.flip(paths.slot(job, 0, 0), next(i.offset for i in manifest.items if i.name == "blocks") + (9 << 20))
        reader.shard(Path(job), 1, 0)
