"""What `allranks test` runs in all ranks: collectives whose results are checked, their speed, a short training."""
