"""`python -m tir_dagster_tests.torture`: kill refreshes, rollbacks and loads again and again; after each, one clean run heals all.

A run that was stopped goes on where it was: its results are kept in the folder until all cases are played.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tir_dagster_tests.conftest import running_sandbox
from tir_dagster_tests.long_runs import STOPPED, Kept, ran_to_its_end, today, write_survival
from tir_dagster_tests.torture.cases import Case, cases
from tir_dagster_tests.torture.playing import Result, play_all
from tir_dagster_tests.torture.report import short_report, write_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tir_dagster_tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="how many processes to kill (about)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same cases")
    parser.add_argument("--only", default="", metavar="POINT", help="only cases with this subject, blow or crash point")
    parser.add_argument("--case", default="", help="this one case, as a failure prints it")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where torture.md and torture.json go")
    parser.add_argument("--write-docs", action="store_true", help="write a short table into docs/survival.md, too")
    options = parser.parse_args()
    asked = {"kills": options.kills, "seed": options.seed, "only": options.only, "case": options.case}
    # A case that is repeated must not end a long run that was stopped.
    name = "torture-part" if options.only or options.case else "torture"
    kept = Kept.of(options.folder / f"{name}.jsonl", asked)
    chosen = [Case.parse(options.case)] if options.case else cases(options.kills, options.seed, only=options.only)
    at_its_end = ran_to_its_end(lambda: _play(kept, chosen), command=" ".join(sys.orig_argv))
    results = list(_latest(kept).values())
    print(write_report(results, options.folder, seed=options.seed))
    if options.write_docs:
        command = f"make torture KILLS={options.kills} SEED={options.seed}"
        write_survival("torture", short_report(results, f"`{command}` ({today()})", cases=len(chosen)))
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"\nFAILED {result.case}\n{result.failure}\nrepeat: {result.case.command}", file=sys.stderr)
    if at_its_end:
        kept.finish()
    if failed:
        return 1
    return 0 if at_its_end else STOPPED


def _latest(kept: Kept) -> dict[str, Result]:
    """Return the last result of each case."""
    return {str(result.case): result for result in map(Result.of, kept.results)}


def _play(kept: Kept, chosen: Sequence[Case]) -> None:
    """Play the cases that have no good result yet."""
    good = {name for name, result in _latest(kept).items() if not result.failure}
    left = [case for case in chosen if str(case) not in good]
    if good:
        print(f"{len(good):,} of {len(chosen):,} cases were played before", flush=True)
    lock, begun, played = threading.Lock(), time.monotonic(), 0

    def keep(result: Result) -> None:
        nonlocal played
        with lock:
            kept.add(asdict(result))
            played += 1
            if played % 10 == 0:
                minutes = (time.monotonic() - begun) / played * (len(left) - played) / 60
                kills = sum(one.kills for one in _latest(kept).values())
                done = f"{len(good) + played:,} of {len(chosen):,} cases"
                print(f"{done}, {kills:,} kills, about {minutes:.0f} min left", flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="tir-torture-", ignore_cleanup_errors=True) as folder,
        running_sandbox(Path(folder)) as sandbox,
    ):
        play_all(sandbox, Path(folder), left, tell=lambda line: print(line, flush=True), keep=keep)


if __name__ == "__main__":
    sys.exit(main())
