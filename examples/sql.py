"""Run the statements of a SQL file in the warehouse that the environment names, as `snow sql -f FILE` would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import snowflake.connector

NAMES = ("account", "user", "password", "host", "port", "protocol")

arguments = {name: os.environ.get(f"SNOWFLAKE_{name.upper()}") for name in NAMES}
with snowflake.connector.connect(**{name: value for name, value in arguments.items() if value}) as connection:
    for cursor in connection.execute_string(Path(sys.argv[1]).read_text(encoding="utf-8"), remove_comments=True):
        words = [word.strip(";") for word in (cursor.query or "").split()]
        rows = f": {cursor.rowcount:,} rows" if words[0] in ("INSERT", "UPDATE", "DELETE", "MERGE") else ""
        if words[0] not in ("BEGIN", "COMMIT"):
            print(words[0], next((word for word in words if word.count(".") == 2), words[-1]) + rows)
