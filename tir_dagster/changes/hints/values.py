"""Values in a hint: what JSON may hold, and how they are shown to people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from datetime import date, time
from decimal import Decimal
from typing import Any

_SHOWN_LETTERS = 60
DIGITS = 400
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


class Unfit(ValueError):  # noqa: N818 - never leaves this module
    """Why a value cannot be used, without its place."""


def scalar(value: Any) -> Any:
    """A value as hints hold it: numbers exact and finite, texts that every system can store."""
    match value:
        case None | bool():
            return value
        # A pandas NaT is a date, too.
        case date() | time() if value == value:  # noqa: PLR0124
            return value
        case int() | float() | Decimal():
            return _number(value)
        case str():
            return checked_text(value)
        # Digits that JSON libraries would round.
        case {"number": str(text), **others} if not others and _NUMBER.fullmatch(text):
            return _number(Decimal(text))
    raise Unfit(f"{shown(value)} is not a value; supported are texts, numbers, true, false and null")


def _number(value: float | Decimal) -> int | Decimal:
    if isinstance(value, int):
        if abs(value) >= 10**DIGITS:
            raise Unfit(f"{shown(value)} is out of range")
        return int(value)
    # The digits that somebody wrote, not the binary fraction nearest to them.
    exact = value if isinstance(value, Decimal) else Decimal(float.__repr__(value))
    if not exact.is_finite():
        raise Unfit(f"{shown(exact)} is not supported; numbers are finite")
    if abs(exact.adjusted()) >= DIGITS or len(exact.as_tuple().digits) > DIGITS:
        raise Unfit(f"{shown(exact)} is out of range: numbers have at most {DIGITS} digits")
    return exact


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def checked_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unfit(f"{shown(value)} holds half a character (a lone surrogate), which no table can") from None
    if "\0" in value:
        raise Unfit(f"{shown(value)} holds a NUL character; describe such rows by other columns")
    return value


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_LETTERS else f"{value[:_SHOWN_LETTERS]!r}…"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**DIGITS:
        return f"a number of more than {DIGITS} digits"
    if isinstance(value, (int, float, Decimal)):
        text = str(value)
        return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
    return value.isoformat() if isinstance(value, (date, time)) else f"a {type(value).__name__}"


def close(wanted: Any, known: Iterable[str]) -> str:
    """What was probably meant. Only the beginning is compared: the search is slow for long texts."""
    word = str(wanted)[:_SHOWN_LETTERS] if isinstance(wanted, str) else ""
    by_case = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return f" (did you mean {by_case[close[0]]}?)" if close else ""
