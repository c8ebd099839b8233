"""The plan of a job: rank layout, environment, commands and scripts."""
