"""Apply the newest change set in a process of its own, which TIR_CRASH_AFTER may kill: `python -m … SPEC_FILE`."""

from __future__ import annotations

import sys

from tir_dagster.cli.refresh import Command, RefreshOutcome
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.spec.reading import load_specs


def main() -> None:
    (spec,) = load_specs(sys.argv[1])
    with dagster_instance() as instance:
        command = Command(spec, instance, print)
        command.apply(RefreshOutcome(spec.name, "changes"), command.context.change_sets.pending()[-1])


if __name__ == "__main__":
    main()
