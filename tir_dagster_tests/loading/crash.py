"""One load in a process of its own, killed with -9 at a step: `python -m … SPEC_FILE STEP`."""

from __future__ import annotations

import os
import sys

from tir_dagster.loading.load import Loader
from tir_dagster.loading.staging import Staged, StagePlan, Unit, right_here
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import load_declared


def die() -> None:
    os.kill(os.getpid(), 9)


def half(plan: StagePlan, units: list[Unit]) -> list[Staged]:
    """Only the first file arrives in the stage."""
    right_here(plan, units[:1])
    die()
    return []


def main() -> None:
    file, step = sys.argv[1:]
    (spec,) = load_declared(file).loads
    stager = half if step == "staging" else right_here
    access = SnowflakeAccess.from_environment(os.environ)
    Loader(spec, access=access, stager=stager, after=lambda done: die() if done == step else None).run()


if __name__ == "__main__":
    main()
