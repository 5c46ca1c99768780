"""Protection against the loss of nodes: parity and copies of shards in other nodes' burst buffers, and rebuilding."""
