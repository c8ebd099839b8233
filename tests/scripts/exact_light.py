"""The training of ``exact_training.py``, for tests on clusters: each of its nodes imports half as much."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # Some tests run it by runpy.run_path(), which does not add that.

from exact_training import main
from momentum import Momentum

if __name__ == "__main__":
    main(Momentum)
