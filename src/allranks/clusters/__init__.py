"""Where a job runs: one file per kind of cluster."""
