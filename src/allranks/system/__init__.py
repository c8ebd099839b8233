"""Facts about this machine: processes, control groups, routes, GPUs, host lists, commands, schedulers."""
