"""`python -m tir_dagster_tests.torture`: kill refreshes, rollbacks and loads again and again; after each, one clean run heals all."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tir_dagster_tests.conftest import running_sandbox
from tir_dagster_tests.torture.cases import Case, cases
from tir_dagster_tests.torture.playing import play_all
from tir_dagster_tests.torture.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tir_dagster_tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="how many processes to kill (about)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same cases")
    parser.add_argument("--only", default="", metavar="POINT", help="only cases with this subject, blow or crash point")
    parser.add_argument("--case", default="", help="this one case, as a failure prints it")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where torture.md and torture.json go")
    options = parser.parse_args()
    # Like Ctrl-C: servers and disks must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [Case.parse(options.case)] if options.case else cases(options.kills, options.seed, only=options.only)
    with (
        tempfile.TemporaryDirectory(prefix="tir-torture-", ignore_cleanup_errors=True) as folder,
        running_sandbox(Path(folder)) as sandbox,
    ):
        results = play_all(sandbox, Path(folder), chosen, tell=lambda line: print(line, flush=True))
    table = write_report(results, options.folder, seed=options.seed)
    print(table)
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"\nFAILED {result.case}\n{result.failure}\nrepeat: {result.case.command}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
