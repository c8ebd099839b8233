"""How often a straggler is named, in simulated runs: of a thousand quiet ones, and of 200 with a slow rank.

The bars are 0, and 95 % with the right rank for the right reason. Where the seconds went is printed behind it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit" / "runs"))

from simulated_steps import missed, named_in_quiet

QUIET, SLOW = 1000, 200


def main() -> None:
    began = time.process_time()
    named = list(named_in_quiet(range(QUIET)))
    print(f"quiet runs in which a rank was named: {len(named)} of {QUIET} (bar: 0) {named}")
    right = SLOW - len(list(missed(range(SLOW))))
    print(f"slow ranks that were named for the right reason: {right} of {SLOW}, {right / SLOW:.1%} (bar: 95 %)")
    print(f"{time.process_time() - began:.1f} s of CPU")


if __name__ == "__main__":
    main()
