"""What a node collects for the checks: the standard library alone, since this package is sent there."""
