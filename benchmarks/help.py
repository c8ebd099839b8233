"""`allranks --help` / `python -c pass`."""

from __future__ import annotations

from harness import ALLRANKS, PYTHON, in_turn, report, timed, workplace


def main() -> None:
    with workplace() as folder:
        ours, theirs = in_turn(
            21, lambda: timed([*ALLRANKS, "--help"], folder), lambda: timed([PYTHON, "-c", "pass"], folder)
        )
    report("allranks --help against python -c pass", ours, theirs, "s", "<= 6")


if __name__ == "__main__":
    main()
