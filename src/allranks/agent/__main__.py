"""Start a node's agent; a run's ``code`` folder holds a copy of this file, so that Python can run the folder."""

import sys

from allranks.agent.main import main

main(sys.argv)
