"""What a billion rows and an extract of 100 GB would cost, from the exponents of a run of `--growth`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.growth import OWN, SERVER, STAGES, WAREHOUSE, Growth, Point, fit

BILLION, LARGE_BYTES = 1_000_000_000, 100_000_000_000
# What a change may be at that size.
CHANGED = (10_000, 1_000_000)
# A gigabit a second.
_BYTES_PER_SECOND = 125_000_000
# A part that grows more slowly than this does not depend on the size.
_CONSTANT = 0.1


@dataclass(frozen=True)
class Estimate:
    """Seconds of the parts of one refresh: by the fitted exponents, and if every part that grows does so as the size does."""

    delivery: str
    rows: int
    keys: int | None
    fitted: dict[str, float]
    linear: dict[str, float]
    bytes_published: float

    @property
    def network(self) -> float:
        return self.bytes_published / _BYTES_PER_SECOND


def estimate(growth: Growth, delivery: str, rows: int, keys: int | None) -> Estimate | None:
    """Begin at the largest extract that was measured, where fixed costs count least. None where too little was measured."""
    points = growth.along("rows", delivery)
    if len(points) < 2:
        return None
    size, largest = max(points.items())
    fitted, linear = {}, {}
    for part in (OWN, WAREHOUSE, SERVER):
        begun = {OWN: largest.own, WAREHOUSE: largest.warehouse, SERVER: largest.server}[part]
        by_rows = _exponent(growth, "rows", delivery, part)
        by_keys = 0.0 if keys is None else _exponent(growth, "keys", delivery, part)
        change = 1.0 if keys is None else max(keys / growth.keys, 1.0) ** by_keys
        fitted[part] = begun * (rows / size) ** by_rows * change
        steep = max(by_rows, 1.0) if by_rows > _CONSTANT else by_rows
        steep_change = (
            1.0
            if keys is None
            else max(keys / growth.keys, 1.0) ** (max(by_keys, 1.0) if by_keys > _CONSTANT else by_keys)
        )
        linear[part] = begun * (rows / size) ** steep * steep_change
    return Estimate(delivery, rows, keys, fitted, linear, _sent(largest, size, rows, keys, growth.keys))


def _exponent(growth: Growth, axis: str, delivery: str, part: str) -> float:
    """Fitted, but never below 0: nothing becomes faster by being larger, that is noise."""
    seconds = growth.parts(axis, delivery).get(part, {})
    return max(fit(seconds).exponent, 0.0) if len(seconds) > 1 else 0.0


def _sent(largest: Point, size: int, rows: int, keys: int | None, measured_keys: int) -> float:
    """A patch sends its change, all others (a part of) the extract."""
    if largest.delivery == "patch":
        return largest.bytes_published * (keys or measured_keys) / measured_keys
    return largest.bytes_published * rows / size


def rows_of_bytes(growth: Growth, size: int) -> int:
    """How many rows of the sample an extract of so many bytes has."""
    largest = max((point for point in growth.good if point.extract_bytes), key=lambda point: point.rows)
    return round(size * largest.rows / largest.extract_bytes)


def scale_tables(growth: Growth) -> str:
    """The part of docs/scale.md that a run writes."""
    return "\n".join(_lines(growth))


def _lines(growth: Growth) -> Iterator[str]:
    sizes = sorted({point.rows for point in growth.good})
    yield f"Measured {growth.date[:10]} with {', '.join(f'{size:,}' for size in sizes)} rows on {growth.machine['cores']} cores ([all numbers](benchmarks/growth.md))."
    targets = ((BILLION, f"{BILLION:,} rows"), (rows_of_bytes(growth, LARGE_BYTES), "an extract of 100 GB"))
    for rows, title in targets:
        yield f"\n**{title[0].upper()}{title[1:]}**{'' if rows == BILLION else f', {rows:,} rows of the sample'}\n"
        yield "| delivery | changed keys | our own | warehouse | Tableau's server | sent | at 1 Gbit/s | together |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|"
        for delivery in growth.deliveries:
            for keys in (None,) if delivery in ("full", "trigger") else CHANGED:
                if found := estimate(growth, delivery, rows, keys):
                    yield _row(found)
    yield "\nExponents over the rows of the extract, and over the changed keys:\n"
    yield from _exponents(growth)


def _row(found: Estimate) -> str:
    cells = [_range(found.fitted[part], found.linear[part]) for part in (OWN, WAREHOUSE, SERVER)]
    together = _range(sum(found.fitted.values()) + found.network, sum(found.linear.values()) + found.network)
    keys = "any" if found.keys is None else f"{found.keys:,}"
    return f"| {found.delivery} | {keys} | {' | '.join(cells)} | {_bytes(found.bytes_published)} | {_time(found.network)} | **{together}** |"


def _exponents(growth: Growth) -> Iterator[str]:
    parts: Sequence[str] = (OWN, WAREHOUSE, SERVER, *STAGES)
    yield f"| | {' | '.join(parts)} |"
    yield f"|---|{'--:|' * len(parts)}"
    for delivery in growth.deliveries:
        for axis, shown in (("rows", "rows"), ("keys", "keys")):
            by_part = growth.parts(axis, delivery)
            cells = [f"{fit(by_part[part]).exponent:.2f}" if len(by_part.get(part, {})) > 1 else "-" for part in parts]
            if any(cell != "-" for cell in cells):
                yield f"| {delivery}, over {shown} | {' | '.join(cells)} |"


def _range(low: float, high: float) -> str:
    return _time(low) if _time(low) == _time(high) else f"{_time(low)} to {_time(high)}"


def _time(seconds: float) -> str:
    if seconds < 0.05:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7_200 else f"{seconds / 3_600:,.1f} h"


def _bytes(size: float) -> str:
    return "-" if size < 1_000 else f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.0f} GB"
