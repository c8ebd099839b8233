"""What a job will need, before it is queued: memory of each rank, traffic of each step, checkpoints."""
