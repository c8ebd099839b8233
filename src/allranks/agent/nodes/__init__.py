"""The agents of several nodes: the coordinator, its client, and spares."""
