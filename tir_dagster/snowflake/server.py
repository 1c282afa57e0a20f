"""Where Snowflake is, as variables and resources say it: checked without showing a value, which may hold a password."""

from __future__ import annotations

import re
from typing import Any

from tir_dagster.errors import SourceError

_ADDRESS = re.compile(r"[@/\\\s]")
_EXAMPLES = {"account": "myorg-myaccount", "host": "myorg-myaccount.snowflakecomputing.com"}


def check_mere_name(name: str, value: str) -> None:
    """Refuse an account or a host that is a whole address: messages name them."""
    if _ADDRESS.search(value):
        raise SourceError(
            f"SNOWFLAKE_{name.upper()} is a whole address, or carries a user or a password. Set it to the mere name, such as "
            f"{_EXAMPLES[name]}, and the credentials to SNOWFLAKE_USER and SNOWFLAKE_PASSWORD."
        )


def whole_number(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise SourceError(f"SNOWFLAKE_{name.upper()} is no whole number. Correct it.") from None
