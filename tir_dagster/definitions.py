"""The definitions that Dagster loads: `defs`."""

from tir_dagster.orchestration.build import build_defs

__all__ = ["build_defs", "defs"]

defs = build_defs()
