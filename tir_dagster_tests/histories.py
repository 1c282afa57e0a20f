"""`python -m tir_dagster_tests.histories`: thousands of random histories on the pure core, hundreds through Hyper and the servers.

After every finished refresh the extract must be what its source shows, as a bag of rows. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tir_dagster_tests.changes.queries import QUERIES
from tir_dagster_tests.changes.random_histories import BATCH, play_batch
from tir_dagster_tests.conftest import running_sandbox
from tir_dagster_tests.long_runs import STOPPED, Kept, ran_to_its_end, today, write_survival
from tir_dagster_tests.orchestration.history import DATABASE, PROJECT
from tir_dagster_tests.orchestration.random_histories import LAYOUTS, Extracts, histories, play

# Histories through Hyper between two lines of progress.
_PIECE = 10
_TELL_SECONDS = 10.0

Play = Callable[[int, int], None]


def play_pure(number: int, count: int) -> None:
    """Play so many histories of the query of this number."""
    play_batch(number, count=count)


@contextmanager
def through_hyper(folder: Path) -> Iterator[Play]:
    """Give a function that plays so many histories through Hyper files and the servers of a sandbox, without Spark."""
    with running_sandbox(folder) as sandbox:
        sandbox.prepare(DATABASE, PROJECT)
        # So few rows are staged without Spark; `make test` and `make soak` play others through Spark.
        extracts = Extracts(sandbox, None, folder)

        def play_piece(number: int, count: int) -> None:
            @seed(number)
            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(drawn=histories())
            def piece(drawn: Any) -> None:
                play(extracts.of(drawn[0]), *drawn[1:])

            piece()

        try:
            yield play_piece
        finally:
            extracts.close()


def played(name: str, kept: Kept, wanted: int, each: int, play: Play, *, tell: Callable[[str], Any]) -> None:
    """Play what is left of so many histories, in pieces; a piece that fails ends the run with its history."""
    done = sum(result["histories"] for result in kept.results)
    told = begun = time.monotonic()
    before = done
    while done < wanted:
        number, count = len(kept.results), min(each, wanted - done)
        started = time.monotonic()
        play(number, count)
        kept.add({"histories": count, "seconds": round(time.monotonic() - started, 2)})
        done += count
        now = time.monotonic()
        if now - told > _TELL_SECONDS or done == wanted:
            left = (now - begun) / (done - before) * (wanted - done)
            tell(f"{name}: {done:,} of {wanted:,} histories, about {left / 60:.0f} min left")
            told = now


def sentence(name: str, kept: Kept, wanted: int, of: str) -> str:
    """Return what was played, as the page shows it."""
    done = sum(result["histories"] for result in kept.results)
    minutes = sum(result["seconds"] for result in kept.results) / 60
    count = f"{done:,}" if done == wanted else f"{done:,} of {wanted:,}"
    return f"{name}: {count} histories of {of} in {minutes:.0f} min; after all of them the extract equalled its source"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tir_dagster_tests.histories", description=__doc__)
    parser.add_argument("--pure", type=int, default=10_000, help="so many histories on the pure core")
    parser.add_argument("--hyper", type=int, default=300, help="so many histories through Hyper and the servers")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where the results go")
    parser.add_argument("--write-docs", action="store_true", help="write the result into docs/survival.md, too")
    options = parser.parse_args()
    pure, hyper = (
        Kept.of(options.folder / f"histories-{name}.jsonl", {"histories": name}) for name in ("pure", "hyper")
    )
    command = f"python -m tir_dagster_tests.histories --pure {options.pure} --hyper {options.hyper}"
    at_its_end = ran_to_its_end(lambda: _run(options, pure, hyper), command=command)
    lines = [
        sentence("On the pure core", pure, options.pure, f"{len(QUERIES)} queries"),
        sentence("Through Hyper and the servers", hyper, options.hyper, f"extracts with {len(LAYOUTS)} layouts"),
    ]
    print("\n".join(lines))
    if options.write_docs:
        write_survival("histories", "\n".join([f"`{command}` ({today()}):", "", *(f"- {line}." for line in lines)]))
    if at_its_end:
        pure.finish()
        hyper.finish()
    return 0 if at_its_end else STOPPED


def _run(options: argparse.Namespace, pure: Kept, hyper: Kept) -> None:
    def tell(line: str) -> None:
        print(line, flush=True)

    played("pure core", pure, options.pure, BATCH, play_pure, tell=tell)
    if sum(result["histories"] for result in hyper.results) < options.hyper:
        with (
            tempfile.TemporaryDirectory(prefix="tir-histories-", ignore_cleanup_errors=True) as home,
            through_hyper(Path(home)) as play_piece,
        ):
            played("through Hyper", hyper, options.hyper, _PIECE, play_piece, tell=tell)


if __name__ == "__main__":
    sys.exit(main())
