"""The self-test on all ranks of a job: run, evaluated, and followed by a search for the node or link at fault."""
