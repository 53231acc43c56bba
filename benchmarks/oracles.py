"""Does each credit × advantage estimate the gradient that theory says? Tested on worlds with an exact gradient.

    make oracles                               all of it, and the tables of docs/oracles.md; about three minutes
    python benchmarks/oracles.py --check       writes nothing; every figure must equal the published one

In each of four small worlds all rollouts are enumerated, and so are all groups of three. That gives the exact policy
gradient, and the mean, bias and variance of each estimator up to rounding. Groups of eight are sampled, as a run would
sample them. oracle/methods.py has theory's claim for each cell; the exit code is 1 if a cell contradicts it. Prints the
tables and writes benchmarks/results/oracles.json and the tables in docs/oracles.md.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from oracle.table import Cell, cells, render

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "oracles.json"
PAGE = ROOT / "docs" / "oracles.md"
MARK = "<!-- what follows is written by `make oracles` -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the published figures")
    check = parser.parse_args().check
    started = time.process_time()
    found: list[Cell] = []
    for cell in cells():
        found.append(cell)
        if sys.stderr.isatty():
            print(f"\r{len(found)} cells", end="", file=sys.stderr)
    print(f"\n{render(found)}\n{len(found)} cells in {time.process_time() - started:.0f} s of CPU time")
    broken = [f"{cell.world}: {cell.method} × {cell.advantage} {reason}" for cell in found if (reason := cell.broken())]
    if check:
        published = [Cell(**row) for row in json.loads(RESULTS.read_text())]
        broken += [
            f"{cell.world}: {cell.method} × {cell.advantage} {reason}"
            for cell in found
            if (reason := cell.moved(published))
        ]
    else:
        RESULTS.write_text(json.dumps([asdict(cell) for cell in found], indent=1) + "\n")
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n" + render(found))
    print("\n".join(broken) or "every bound is kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
