"""Start a node's agent; the archive ``code`` of a run holds a copy of this file, so that Python can run the archive."""

import sys

from allranks.agent.main import main

main(sys.argv)
