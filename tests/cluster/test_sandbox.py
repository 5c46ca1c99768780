from __future__ import annotations

import pytest

pytestmark = pytest.mark.cluster


def test_srun_on_two_nodes_as_alice(cluster):
    done = cluster.run(["srun", "-N2", "sh", "-c", "echo $(hostname) $(id -un)"], user="alice")
    assert sorted(done.stdout.splitlines()) == ["node1 alice", "node2 alice"]
