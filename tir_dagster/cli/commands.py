"""Choose the extract, the slices and the command class for a `tir` command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tir_dagster.cli.refresh import Command
from tir_dagster.cli.trigger import TriggerCommand
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.partitions import known_slices, slices_between
from tir_dagster.spec.extract import ExtractSpec


def find_spec(specs: Sequence[ExtractSpec], name: str) -> ExtractSpec:
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None:
        known = ", ".join(spec.name for spec in specs)
        hint = f"The spec file declares {known}" if known else "Name a spec file with --specs or TIR_SPECS"
        raise SpecError(f"There is no extract {name!r}. {hint}.")
    return spec


@contextmanager
def command(spec: ExtractSpec, progress: Callable[[str], None]) -> Iterator[Command]:
    with dagster_instance() as instance:
        yield (TriggerCommand if spec.delivery == "trigger" else Command)(spec, instance, progress)


def chosen_slices(spec: ExtractSpec, text: str | None) -> list[str]:
    """Return the slices that `--slices` names; for slices by value, Dagster's partitions are the known ones."""
    if not text:
        return []
    if spec.slices.by != "value":
        return slices_between(spec, text)
    with dagster_instance() as instance:
        return slices_between(spec, text, known_slices(instance, spec))
