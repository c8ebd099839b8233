"""Reads the logs of all ranks: discovers, merges and follows them, and finds causes of failures."""
