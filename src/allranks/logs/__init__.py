"""The logs of all ranks, read by the launcher: discovered, merged, followed, searched for a cause."""
