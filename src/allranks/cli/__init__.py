"""The command line: one file per verb, rendering in one place."""
