"""The training of ``exact_training.py`` to the bit, for tests that start it often: its ranks import half as much."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # Some tests run it by runpy.run_path(), which does not add that.

from exact_training import main
from unguarded import AdamW

if __name__ == "__main__":
    main(AdamW)
