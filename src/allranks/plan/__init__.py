"""What will be executed: rank layout, environment and scripts."""
