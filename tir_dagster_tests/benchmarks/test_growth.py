"""Growth: exponents from points, what is extrapolated from them, and that the docs show the recorded run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.docs import DOCS, SCALE, filled, growth_page, read_growth, scale_excerpt
from benchmarks.growth import OWN, SERVER, Growth, Point, PointStore, fit, keys_at
from benchmarks.growth_run import Clock
from benchmarks.plots import draw_growth
from benchmarks.scale import BILLION, estimate, rows_of_bytes, scale_tables
from tir_dagster.errors import TirError

SIZES = (1_000_000, 10_000_000)
MACHINE = {"system": "Linux", "processor": "a processor", "cores": 2, "memory_gb": 24, "load": 0.5}


SETTING = {"machine": MACHINE, "versions": {"Python": "3.11"}, "date": "2026-11-18 20:00 UTC"}


def point(rows: int, keys: int = 10_000, delivery: str = "republish", **values) -> Point:
    return Point(rows, keys, delivery, extract_bytes=rows * 40, **values)


def growth_of(*points: Point) -> Growth:
    return Growth(10_000, SIZES[-1], points=points, **SETTING)


@pytest.fixture
def growth() -> Growth:
    """Our own time of `republish` grows as the root of the size and with the change; what the server does, as the size does."""
    republish = [
        point(rows, own=(rows / 1e6) ** 0.5, server=rows / 1e6, stages={"verify": 0.1}, bytes_published=rows * 40)
        for rows in SIZES
    ]
    patch = [
        point(rows, delivery="patch", own=1.0, server=rows / 1e7, stages={"verify": 0.1}, bytes_published=500_000)
        for rows in SIZES
    ]
    more = [point(SIZES[-1], 100_000, own=10 * 10**0.5, server=10.0)]
    return growth_of(*republish, *patch, *more)


def test_the_exponent_tells_how_time_grows_with_size():
    sizes = (1_000, 5_000, 20_000)
    assert fit(dict.fromkeys(sizes, 2.0)).exponent == pytest.approx(0)
    linear = fit({size: size / 1_000 for size in sizes})
    assert (linear.exponent, linear.at(100_000)) == (pytest.approx(1), pytest.approx(100))
    assert fit({size: size**0.5 for size in sizes}).exponent == pytest.approx(0.5)


def test_parts_have_exponents_over_rows_and_over_keys(growth: Growth):
    assert growth.fits("rows")[f"republish, {OWN}"].exponent == pytest.approx(0.5)
    assert growth.fits("rows")[f"republish, {SERVER}"].exponent == pytest.approx(1)
    assert growth.fits("keys")[f"republish, {OWN}"].exponent == pytest.approx(1)
    own, verify = growth.goals
    assert (own.reached, own.met, verify.reached) == (pytest.approx(0), True, pytest.approx(0))


def test_extrapolation_follows_the_exponents_from_the_largest_size(growth: Growth):
    found = estimate(growth, "republish", BILLION, 10_000)
    assert found is not None
    assert found.fitted[OWN] == pytest.approx(10**0.5 * 100**0.5)
    assert found.linear[OWN] == pytest.approx(10**0.5 * 100), "what grows at all is assumed to grow as the size does"
    assert (found.fitted[SERVER], found.linear[SERVER]) == (pytest.approx(1_000), pytest.approx(1_000))
    assert found.bytes_published == BILLION * 40
    more = estimate(growth, "republish", BILLION, 1_000_000)
    assert more is not None
    assert more.fitted[OWN] == pytest.approx(found.fitted[OWN] * 100)


def test_a_patch_sends_its_change_at_any_size(growth: Growth):
    found = estimate(growth, "patch", BILLION, 1_000_000)
    assert found is not None
    assert (found.fitted[OWN], found.linear[OWN]) == (pytest.approx(1.0), pytest.approx(1.0)), "no exponent, no growth"
    assert found.bytes_published == 50_000_000


def test_too_few_points_give_no_estimate_and_failed_ones_count_for_nothing(growth: Growth):
    assert estimate(growth, "server", BILLION, 10_000) is None
    failed = growth_of(
        *growth.points, point(SIZES[0], delivery="server", error="no"), point(SIZES[1], delivery="server", own=1.0)
    )
    assert estimate(failed, "server", BILLION, 10_000) is None
    assert not failed.equal
    assert "FAILED: server" in failed.as_text()


def test_the_tables_name_what_was_measured_and_what_it_would_be(growth: Growth):
    assert rows_of_bytes(growth, 100_000_000_000) == 2_500_000_000
    text = scale_tables(growth)
    assert "1,000,000,000 rows" in text
    assert "2,500,000,000 rows of the sample" in text
    assert "| republish | 10,000 | 32 s to 5 min |" in text
    assert "0.50" in text


def test_at_the_fixed_size_other_numbers_of_keys_change_too():
    shares = (0.01, 0.1, 1, 10)
    assert keys_at(1_000_000, keys=10_000, fixed=10_000_000, shares=shares) == [10_000]
    assert keys_at(10_000_000, keys=10_000, fixed=10_000_000, shares=shares) == [1_000, 10_000, 100_000, 1_000_000]


def test_points_of_a_run_that_ended_early_are_kept(tmp_path: Path):
    file = tmp_path / "growth" / "points.jsonl"
    store = PointStore(file, 1, SETTING, resume=False)
    store.add(point(1_000, 10, own=1.0))
    store.add(point(1_000, 10, "patch", error="no"))
    with file.open("a", encoding="utf-8") as opened:
        opened.write('{"rows": 1000, "ke')
    resumed = PointStore(file, 1, {**SETTING, "date": "later"}, resume=True)
    assert resumed.has(1_000, 10, "republish")
    assert not resumed.has(1_000, 10, "patch"), "what failed is tried again"
    assert resumed.setting == SETTING, "the run's own machine and date"
    resumed.add(point(2_000, 10, own=2.0))
    assert [p.rows for p in PointStore(file, 1, SETTING, resume=True).points] == [1_000, 2_000]
    with pytest.raises(TirError, match="asked for something else"):
        PointStore(file, 2, SETTING, resume=True)


def test_each_point_tells_how_many_are_left_and_a_resumed_run_counts_those_it_has(tmp_path: Path):
    store, told = PointStore(tmp_path / "points.jsonl", 1, SETTING, resume=False), []
    store.add(point(1_000, 10, "full"))
    clock = Clock([(1_000, 10, "full"), (1_000, 10, "patch"), (2_000, 10, "patch")], store, told.append)
    assert clock.left() == [(1_000, 10, "patch"), (2_000, 10, "patch")]
    store.add(point(1_000, 10, "patch"))
    clock.tell()
    assert told == ["2 of 3 points: about 0 min left"]


def test_the_picture_is_drawn_twice(growth: Growth, tmp_path: Path):
    png, svg = draw_growth(growth, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text(encoding="utf-8")


def test_the_published_tables_are_those_of_the_recorded_run():
    growth = read_growth()
    page = SCALE.read_text(encoding="utf-8")
    assert filled(page, "scale", scale_excerpt(growth)) == page
    written = {file.name for file in DOCS.glob("growth.*")}
    assert written == (set() if growth is None else {f"growth.{kind}" for kind in ("json", "md", "png", "svg")})
    if growth is not None:
        assert growth.equal
        assert (DOCS / "growth.md").read_text(encoding="utf-8") == growth_page(growth)
