"""Command line: thin click groups that parse, call and print."""
