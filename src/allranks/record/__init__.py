"""What nodes write of a run, and its readers. Copied to nodes: needs the standard library alone."""
