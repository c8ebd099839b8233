"""The record of a run on disk: paths, events, status and the logs of all ranks."""
