"""`python -m tir_dagster.sandbox.people --home DIR --port N`."""

from __future__ import annotations

from tir_dagster.sandbox.people.app import build_app
from tir_dagster.sandbox.serve import run_server

if __name__ == "__main__":
    run_server("people", build_app)
