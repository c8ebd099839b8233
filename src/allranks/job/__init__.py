"""What the user asks for: the typed job, where each value came from, and how it is read."""
