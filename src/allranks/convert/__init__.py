"""Turns launch scripts that were written by hand into job files."""
