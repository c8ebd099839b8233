"""The ranks of this node: the fork server that starts them, and the worker group."""
