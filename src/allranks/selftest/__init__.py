"""The self-test of `allranks test` in each rank: collectives and their results, bandwidth, a short training."""
