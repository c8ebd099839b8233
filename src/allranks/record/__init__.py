"""The files that nodes write for a run, and their readers. Copied to nodes: needs only the standard library."""
