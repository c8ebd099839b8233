"""The training of ``exact_training.py``, for tests on clusters: each of its nodes imports half as much."""

from exact_training import main
from momentum import Momentum

if __name__ == "__main__":
    main(Momentum)
