"""Estimates what a job needs before it is queued: memory per rank, traffic per step, size of checkpoints."""
