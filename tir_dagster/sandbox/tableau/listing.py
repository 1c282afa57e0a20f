"""Lists as Tableau serves them: filter expressions, sort expressions, pages with totals."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.wire import ApiError, node, whole_number

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

MAX_PAGE_SIZE = 1000
_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}

# A row's values by the field names of the REST API: text, numbers or truth values.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Clause:
    """One condition of a filter expression."""

    field: str
    operator: str
    value: str

    def accepts(self, row: Row, *, any_case: bool = False) -> bool:
        if self.field not in row:
            raise ApiError(400000, f"Invalid filter expression: {self.field!r} is not a field to filter on")
        actual = row[self.field]
        if self.operator == "in":
            return _text(actual) in [item.strip() for item in self.value.strip("[]").split(",")]
        if self.operator == "has":
            return self.value in _text(actual)
        if self.operator in _ORDERED:
            return self._compares(actual)
        if self.operator == "cieq" or (any_case and self.operator == "eq" and "*" not in self.value):
            return self.value.casefold() == _text(actual).casefold()
        if self.operator != "eq":
            raise ApiError(400000, f"Invalid filter expression: unknown operator {self.operator!r}")
        if "*" in self.value:
            return fnmatch.fnmatchcase(_text(actual), self.value.replace("[", "[[]"))
        return self.value == _text(actual)

    def _compares(self, actual: Any) -> bool:
        if actual is None:
            return False
        if isinstance(actual, int):
            try:
                return _ORDERED[self.operator](actual, int(self.value))
            except ValueError as error:
                raise ApiError(400000, f"Invalid filter expression: {self.value!r} is not a number") from error
        return _ORDERED[self.operator](str(actual), self.value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _split(expression: str) -> list[str]:
    """The clauses: apart at commas, but not at those in brackets."""
    parts, inside = [""], False
    for letter in expression:
        if letter == "," and not inside:
            parts.append("")
            continue
        inside = letter == "[" or (inside and letter != "]")
        parts[-1] += letter
    return parts


def parse_filter(expression: str | None) -> list[Clause]:
    """`name:eq:X,projectName:in:[A,B]`; a comma inside a value ends the clause, as it does on a real server."""
    clauses = []
    for part in _split(expression) if expression else []:
        pieces = part.split(":", 2)
        if len(pieces) != 3:
            raise ApiError(400000, f"Invalid filter expression: {part!r} is not field:operator:value")
        clauses.append(Clause(*pieces))
    return clauses


def _sorted(rows: Sequence[Row], expression: str | None) -> list[Row]:
    result = list(rows)
    for part in reversed(expression.split(",") if expression else []):
        name, _, direction = part.partition(":")
        if direction not in ("asc", "desc") or any(name not in row for row in result):
            raise ApiError(400000, f"Invalid sort expression: {part!r}")
        result.sort(key=lambda row: _sort_key(row[name]), reverse=direction == "desc")
    return result


def _sort_key(value: Any) -> tuple[int, Any]:
    return (1, value) if isinstance(value, (int, float)) else (0 if value is None else 2, _text(value))


def page(
    rows: Sequence[Row],
    query: Mapping[str, str],
    tag: str,
    render: Callable[[Row], ET.Element],
    *,
    any_case: Collection[str] = (),
) -> tuple[ET.Element, ...]:
    """The pagination element and the list element that answer a query; `eq` on fields of `any_case` ignores case."""
    clauses = parse_filter(query.get("filter"))
    accepted = [
        row for row in rows if all(clause.accepts(row, any_case=clause.field in any_case) for clause in clauses)
    ]
    kept = _sorted(accepted, query.get("sort"))
    size = _number(query.get("pageSize", "100"), 400007, "page size")
    number = _number(query.get("pageNumber", "1"), 400006, "page number")
    if size > MAX_PAGE_SIZE:
        raise ApiError(400007, f"Invalid page size: {size} is more than {MAX_PAGE_SIZE}")
    start = (number - 1) * size
    if start and start >= len(kept):
        raise ApiError(400006, f"Invalid page number: {number} is beyond the last page")
    pagination = node("pagination", {"pageNumber": number, "pageSize": size, "totalAvailable": len(kept)})
    return pagination, node(tag, {}, *(render(row) for row in kept[start : start + size]))


def _number(text: str, code: int, what: str) -> int:
    number = whole_number(text)
    if not number:
        raise ApiError(code, f"Invalid {what}: {text!r}")
    return number
