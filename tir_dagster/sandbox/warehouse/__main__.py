"""`python -m tir_dagster.sandbox.warehouse --home DIR --port N`."""

from tir_dagster.sandbox.serve import run_server
from tir_dagster.sandbox.warehouse.app import build_app

run_server("warehouse", build_app)
