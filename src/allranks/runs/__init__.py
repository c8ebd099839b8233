"""The launcher's view of a run: its record on disk, its status, and the reports of its agents."""
