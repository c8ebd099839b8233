"""On each node: starts the ranks, watches them and reports what happens."""
