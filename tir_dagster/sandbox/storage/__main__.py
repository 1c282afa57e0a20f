"""`python -m tir_dagster.sandbox.storage --home DIR --port N`."""

from __future__ import annotations

from tir_dagster.sandbox.serve import run_server
from tir_dagster.sandbox.storage.app import build_app

if __name__ == "__main__":
    run_server("storage", build_app, tells_time=True)
