"""The benchmark of a restore, small: what it says, not how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from slurm_resil.bench import restore, workload
from slurm_resil.core.errors import ResilError

OURS = {"limit", "load_limit", "load_pieces", "drained_limit"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_json_object_of_the_agreed_form(tmp_path, dtype):
    code = "from slurm_resil.bench import restore; restore.MANY = 300; from slurm_resil.cli.main import main; main()"
    argv = [sys.executable, "-c", code, "bench", "restore", "--json", "--size-mib", "2", "--repeats", "2"]
    peers = [] if dtype == "float32" else ["--no-peers", "--nodes", "2", "--pfs-rate", "1e9"]
    argv += ["--dir", str(tmp_path), "--dtype", dtype, *(peers or ["--nodes", "0"])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == {"bench", "size_bytes", "repeats", "ratios", "figures", "machine"}
    assert (result["bench"], result["size_bytes"], result["repeats"]) == ("restore", 2 << 20, 2)
    theirs = {"peer_torch", "peer_torch_hashed", "peer_dcp"} if dtype == "float32" else set()
    fetch = {"restore.fetch"} if peers else set()
    assert set(result["ratios"]) == fetch | {f"restore.{name}{of}" for name in OURS | theirs for of in ("", "_many")}
    assert all(value > 0 for value in result["ratios"].values())
    figures = result["figures"]
    assert result["ratios"]["restore.limit"] == figures["restore_s"] / (figures["read_s"] + figures["copy_s"])
    assert os.listdir(tmp_path) == []


def test_a_restore_that_does_nothing_is_no_fast_one():
    check = restore._Check(workload.model(1 << 12, 3, torch.float32))
    with pytest.raises(ResilError, match="did not restore"), check.restored("load"):
        pass


def test_the_plain_way_moves_all_bytes(tmp_path):
    model = workload.model(1 << 12, 3, torch.bfloat16)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    path, items, data = tmp_path / "file", {}, b""
    for index, tensor in enumerate(saved):
        data += b"\0" * 64
        items[f"model/p{index}"] = restore.DrainedItem(
            name="", dtype="torch.bfloat16", shape=tuple(tensor.shape), offset=len(data), nbytes=tensor.nbytes
        )
        data += tensor.view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    plain = restore._Plain(str(path), items, model)
    for how in (lambda: (plain.read(), plain.copy()), plain.pieces):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        how()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved, strict=True))
