"""Start, watch, restart and requeue the ranks of a job."""
