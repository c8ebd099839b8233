"""Checkpoints: the state of a training, written in the background, committed atomically, resumed from exactly."""
