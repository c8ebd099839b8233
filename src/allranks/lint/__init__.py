"""Finds what fails, hangs or trains wrongly in launch scripts that were written by hand. Runs nothing of them."""
