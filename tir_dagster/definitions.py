"""What Dagster loads: `defs`, and how it is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from tir_dagster.orchestration.extracts import build_extract_defs
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.translation import ExtractTranslator
from tir_dagster.spec import ExtractSpec, load_specs


def build_defs(
    *,
    specs: Sequence[ExtractSpec] | None = None,
    resource_overrides: Mapping[str, Any] | None = None,
    translator: ExtractTranslator | None = None,
) -> dg.Definitions:
    """All declared extracts (default: those of TIR_SPECS) and resources by environment."""
    declared = load_specs() if specs is None else specs
    # In process also for runs that name assets and no job: a step of its own process would start a JVM of its own.
    common = dg.Definitions(
        resources={**environment_resources(), **(resource_overrides or {})}, executor=dg.in_process_executor
    )
    return dg.Definitions.merge(common, *(build_extract_defs(spec, translator=translator) for spec in declared))


defs = build_defs()
