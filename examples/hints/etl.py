"""An ETL job as it might run in Airflow, Glue or Lambda: it changes a table, and says which rows it changed.

It reports the hint to Dagster's webserver if DAGSTER_URL is set; else it writes it to hint.json, for `tir refresh --hint @hint.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import requests
import snowflake.connector

EXTRACT = "hinted_orders"
TABLE = "ETL.PUBLIC.ORDERS"
DAY = "2026-06-15"
NAMES = ("account", "user", "password", "host", "port", "protocol")

arguments = {name: os.environ.get(f"SNOWFLAKE_{name.upper()}") for name in NAMES}
with snowflake.connector.connect(**{name: value for name, value in arguments.items() if value}) as connection:
    changed = connection.cursor().execute(f"UPDATE {TABLE} SET AMOUNT = AMOUNT * 2 WHERE ORDER_DATE = %s", (DAY,))
    print(f"{changed.rowcount} orders of {DAY} were corrected")  # type: ignore[union-attr]

hint = {"table": TABLE, "type": "UPDATE_ROWS", "scope": {"equal": {"ORDER_DATE": DAY}}}
if dagster := os.environ.get("DAGSTER_URL"):
    address = f"{dagster}/report_asset_materialization/{EXTRACT}/source_table"
    requests.post(address, json={"metadata": {"tir/hint": hint}}, timeout=30).raise_for_status()
else:
    folder = Path(os.environ.get("TIR_HOME", "."))
    (folder / "hint.json").write_text(json.dumps(hint), encoding="utf-8")
