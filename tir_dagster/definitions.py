"""What Dagster loads: `defs`, and how it is put together."""

from __future__ import annotations

import dagster as dg


def build_defs() -> dg.Definitions:
    """The definitions of this project; extracts join them as they are declared."""
    return dg.Definitions()


defs = build_defs()
