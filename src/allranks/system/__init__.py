"""What this machine is, for everybody: processes, control groups, routes, host lists, commands."""
