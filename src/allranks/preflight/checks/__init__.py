"""The checks, each in its place; :mod:`allranks.preflight.registry` says in which order they are shown."""
