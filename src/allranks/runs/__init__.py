"""What the launcher knows of a run: its record on disk, its status, what its agents have reported."""
