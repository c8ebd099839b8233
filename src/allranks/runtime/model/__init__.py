"""Model and optimizer: data parallelism, the forward and backward pass, and the step."""
