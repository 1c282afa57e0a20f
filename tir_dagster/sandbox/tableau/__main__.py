"""`python -m tir_dagster.sandbox.tableau --home DIR --port N --warehouse-port M`."""

from __future__ import annotations

from tir_dagster.sandbox.serve import run_server
from tir_dagster.sandbox.tableau.app import build_app

if __name__ == "__main__":
    run_server("tableau", build_app)
