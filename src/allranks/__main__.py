"""``python -m allranks``."""

from allranks.cli.main import main

main()
