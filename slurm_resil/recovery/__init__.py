"""The recovery engine: the one privileged process, which continues jobs on good nodes."""
