"""The report as one HTML page that needs nothing else: no network, script, font or image. Every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from tir_dagster.alerts.text import span
from tir_dagster.changes.change_set import NO_SLICE_KEY, slice_label
from tir_dagster.cli.overview.past import PastRefresh, megabytes

if TYPE_CHECKING:
    from tir_dagster.cli.overview.report import Report

# The most refreshes and slices of the map; more would be too small to see, and are counted beside it.
_COLUMNS, _ROWS = 60, 60
_LISTED = 50
_CELL, _GAP = 14, 2
# The room for a date below the columns, and what a page has for all columns: fewer of them are broader.
_DATE, _PLOT, _BROADEST = 44, 960, 48
_STEPS = 5
_TALL = 140
_STAGES = ("look", "survey", "spark", "detect", "shell", "apply", "verify", "publish")

_STYLE = """
:root { --page: #f6f7f9; --card: #fff; --ink: #1b2430; --soft: #5b6675; --line: #dde2e9; --none: #eceff3;
  --h1: #cfe3f7; --h2: #93c1ec; --h3: #559bdc; --h4: #2873b8; --h5: #124a80; --full: #c9822b;
  --good: #1d7f4e; --bad: #c0342b; --warn: #96650a; --moved: #2873b8; --rest: #d5dbe3;
  --s0: #7c8aa0; --s1: #559bdc; --s2: #9a6fd0; --s3: #2873b8; --s4: #b9a26a; --s5: #2f9e8f; --s6: #6aa84f; --s7: #c9822b; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --card: #1b212a; --ink: #e4e9f0; --soft: #9aa6b5; --line: #313a46; --none: #262d37;
  --h1: #17395a; --h2: #1f568b; --h3: #2f7cc2; --h4: #63a8e6; --h5: #b4d8f8; --full: #e0a04e;
  --good: #55c28a; --bad: #f0766d; --warn: #dcab4b; --moved: #63a8e6; --rest: #3a4451; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 48px }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 17px; margin: 0 0 4px } p { margin: 0 0 12px } .soft { color: var(--soft) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; margin-top: 16px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-top: 16px }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px }
.tile b { display: block; font-size: 21px; line-height: 1.25; overflow-wrap: anywhere } .tile > span { color: var(--soft); font-size: 13px }
.good { color: var(--good) } .bad { color: var(--bad) } .warn { color: var(--warn) }
.wide { overflow-x: auto } .chart { display: flex } .chart > svg { flex: none } .chart > .wide { flex: 1; min-width: 0; direction: rtl }
.chart > .wide > svg { direction: ltr; margin-right: auto } svg { display: block } svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
.c0 { fill: var(--none) } .c1 { fill: var(--h1) } .c2 { fill: var(--h2) } .c3 { fill: var(--h3) } .c4 { fill: var(--h4) } .c5 { fill: var(--h5) }
.cf { fill: var(--full) } .late { fill: var(--bad) } .moved { fill: var(--moved) } .rest { fill: var(--rest) }
.s0 { fill: var(--s0) } .s1 { fill: var(--s1) } .s2 { fill: var(--s2) } .s3 { fill: var(--s3) }
.s4 { fill: var(--s4) } .s5 { fill: var(--s5) } .s6 { fill: var(--s6) } .s7 { fill: var(--s7) }
.key { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; color: var(--soft); margin: 8px 0 0; padding: 0; list-style: none }
.key svg { display: inline-block; margin-right: 5px; vertical-align: -1px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: top }
th { color: var(--soft); font-weight: 500 } th.t, td.t { text-align: left } td.w { white-space: normal; min-width: 240px }
meter { width: 100% } ul.plain { margin: 0; padding-left: 18px }
"""


def write_page(report: Report) -> str:
    """Return the page."""
    spec, refreshes = report.spec, list(report.refreshes)
    name = escape(spec.name)
    place = f"{spec.datasource.name} in project {spec.datasource.project}, from {spec.main_table}; delivered by {spec.delivery}"
    parts = [
        f"<h1>{name}</h1>",
        f'<p class="soft">{escape(place)}. Made {_moment(report.made_at.timestamp())}.</p>',
        _tiles(report),
        _problems(report),
    ]
    if refreshes:
        parts += [_map(refreshes), _saved(refreshes), _durations(refreshes), _freshness(report)]
    else:
        parts.append(
            f"<section><h2>No refresh yet</h2><p>Start the first one: <code>tir refresh {name}</code>.</p></section>"
        )
    parts += [_verification(report), _incidents(report), _table(refreshes) if refreshes else ""]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'\"><title>{name}: refreshes</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(filter(None, parts))
        + "</main></body></html>\n"
    )


def _tiles(report: Report) -> str:
    state, refreshes = report.state, report.refreshes
    colour = {"ok": "good", "running": "good", "problem": "bad"}.get(state.state, "warn")
    tiles = [(f'<span class="{colour}">{escape(state.state)}</span>', "state", True)]
    if refreshes:
        newest = refreshes[0]
        age = max(report.made_at.timestamp() - datetime.fromisoformat(newest.source_version).timestamp(), 0)
        tiles += [
            (f"{newest.rows:,}", "rows published", False),
            (span(age), "is the age of the data that people see", False),
            (f"{len(refreshes):,}", f"refreshes since {_day(refreshes[-1].at)}", False),
        ]
        if newest.extract_bytes is not None:
            limit = f"; built anew above {megabytes(newest.rebuilt_above)}" if newest.rebuilt_above else ""
            tiles.append((megabytes(newest.extract_bytes), f"extract file{limit}", False))
        moved, full = _moved(refreshes)
        if full:
            tiles.append((f"{moved / full:.2%}", "of the rows read that full refreshes would have read", False))
    if report.spec.freshness:
        tiles.append((span(report.spec.freshness), "is the oldest that a publish should be", False))
    cells = (
        f'<div class="tile"><b>{text if raw else escape(text)}</b><span>{escape(what)}</span></div>'
        for text, what, raw in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _problems(report: Report) -> str:
    if not report.state.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in report.state.notes)
    colour = ' class="bad"' if report.state.state == "problem" else ""
    return f'<section><h2{colour}>{"Problems" if colour else "Notes"}</h2><ul class="plain">{items}</ul></section>'


def _map(refreshes: Sequence[PastRefresh]) -> str:
    """Draw slices by refreshes, each cell as dark as many rows changed."""
    shown = list(reversed(refreshes[:_COLUMNS]))
    names = _slice_order(shown)
    left = max(len(names) - _ROWS, 0)
    names = names[-_ROWS:]
    most = max(
        (max(counts) for refresh in shown if refresh.decision != "full" for counts in refresh.slices.values()),
        default=0,
    )
    high, step = _CELL + _GAP, _step(shown)
    labels = [(row * high + 11, _cut(name)) for row, name in enumerate(names)]
    cells = []
    for at, refresh in enumerate(shown):
        for row, name in enumerate(names):
            removed, added = refresh.slices.get(name, (0, 0))
            colour = (
                "cf" if refresh.decision == "full" and (removed or added) else f"c{_shade(max(removed, added), most)}"
            )
            title = f"{name}, {_moment(refresh.at)}: {removed:,} rows removed, {added:,} added ({refresh.decision})"
            cells.append(
                f'<rect class="{colour}" x="{at * step}" y="{row * high}" width="{step - _GAP}" height="{_CELL}" rx="2">'
                f"<title>{escape(title)}</title></rect>"
            )
    more = [f"the {_COLUMNS} newest of {len(refreshes):,} refreshes"] if len(refreshes) > _COLUMNS else []
    more += [f"without {left:,} earlier slices"] if left else []
    key = [("c0", "nothing"), ("c1", "few"), ("c3", "some"), ("c5", f"{most:,} rows"), ("cf", "everything was loaded")]
    return _section(
        "Which slices changed",
        f"One column for each refresh, the newest on the right; one row for each slice{': ' + ', '.join(more) if more else ''}. "
        "The stronger the colour, the more rows changed.",
        _chart("Changed rows by slice and refresh", shown, cells, labels, tall=len(names) * high)
        if names
        else '<p class="soft">What each refresh replaced is no longer kept (keep.history).</p>',
        _key(key),
    )


def _slice_order(refreshes: Sequence[PastRefresh]) -> list[str]:
    """Return all slices that refreshes touched, in the order of their names, the rest last."""
    rest = slice_label(NO_SLICE_KEY)
    return sorted({name for refresh in refreshes for name in refresh.slices}, key=lambda name: (name == rest, name))


def _step(shown: Sequence[PastRefresh]) -> int:
    """Return the width of a column with its gap."""
    return min(max(_PLOT // max(len(shown), 1), _CELL + _GAP), _BROADEST)


def _chart(
    title: str, shown: Sequence[PastRefresh], cells: Sequence[str], labels: Sequence[tuple[int, str]], *, tall: int
) -> str:
    """Draw columns of refreshes with dates below; where they do not fit, the newest are seen first, and the labels stay."""
    step = _step(shown)
    dates = "".join(
        f'<text x="{at * step}" y="{tall + 14}">{_day(shown[at].at)[5:]}</text>'
        for at in range(0, len(shown), -(-_DATE // step))
    )
    # Letters of 11 pixels are about 7 broad.
    room = max((7 * len(text) for _, text in labels), default=0) + 8
    beside = "".join(f'<text x="{room - 8}" y="{y}" text-anchor="end">{escape(text)}</text>' for y, text in labels)
    width, height = len(shown) * step + _DATE, tall + 22
    return (
        f'<div class="chart"><svg width="{room}" height="{height}" aria-hidden="true">{beside}</svg><div class="wide">'
        f'<svg role="img" aria-label="{title}" width="{width}" height="{height}">{"".join(cells)}{dates}</svg></div></div>'
    )


def _shade(count: int, most: int) -> int:
    """Return a step from 0 for none to the darkest for the most; by roots, or one large change would hide all others."""
    return 0 if not count else min(_STEPS, 1 + int((_STEPS - 1) * (count / most) ** 0.5)) if most else _STEPS


def _moved(refreshes: Sequence[PastRefresh]) -> tuple[int, int]:
    """Return the rows that refreshes read, and those that full ones would have read instead."""
    known = [(refresh.rows_appended, refresh.rows) for refresh in refreshes if refresh.rows_appended is not None]
    return sum(moved for moved, _ in known), sum(rows for _, rows in known)


def _saved(refreshes: Sequence[PastRefresh]) -> str:
    moved, full = _moved(refreshes)
    if not full:
        return ""
    per_row = [
        refresh.bytes_read / refresh.rows_appended
        for refresh in refreshes
        if refresh.bytes_read and refresh.rows_appended
    ]
    rows: list[tuple[str, float, float, str, str]] = [
        ("rows read from Snowflake", moved, full, f"{moved:,}", f"{full:,}")
    ]
    read = sum(refresh.bytes_read or 0 for refresh in refreshes)
    if read and per_row:
        # By the largest refresh: a small one also reads keys and the beginnings of files.
        largest = max(
            (refresh for refresh in refreshes if refresh.bytes_read and refresh.rows_appended),
            key=lambda one: one.rows_appended or 0,
        )
        would = full * (largest.bytes_read or 0) / (largest.rows_appended or 1)
        rows.append(("bytes read from Snowflake", read, would, megabytes(read), f"about {megabytes(would)}"))
    sent = sum(refresh.bytes_sent or 0 for refresh in refreshes)
    whole = sum(refresh.extract_bytes or 0 for refresh in refreshes if refresh.bytes_sent)
    if sent and whole > sent:
        rows.append(("bytes sent to Tableau", sent, whole, megabytes(sent), f"at most {megabytes(whole)}"))
    body = "".join(
        f'<tr><td class="t">{what}</td><td>{mine}</td><td>{theirs}</td><td>{part / whole_part:.2%}</td><td class="t" style="width:40%">'
        f'<svg width="100%" height="12" aria-hidden="true"><rect class="rest" width="100%" height="12" rx="3"/>'
        f'<rect class="moved" width="{max(100 * part / whole_part, 0.4):.2f}%" height="12" rx="3"/></svg></td></tr>'
        for what, part, whole_part, mine, theirs in rows
    )
    return _section(
        "What moved, against full refreshes",
        "What these refreshes moved, and what loading everything each time would have moved.",
        f'<div class="wide"><table><tr><th class="t"></th><th>moved</th><th>full refreshes</th><th>share</th><th class="t"></th></tr>{body}</table></div>',
    )


def _durations(refreshes: Sequence[PastRefresh]) -> str:
    shown = [refresh for refresh in reversed(refreshes[:_COLUMNS]) if refresh.stages]
    longest = max((max(refresh.seconds or 0, sum(refresh.stages.values())) for refresh in shown), default=0)
    if not longest:
        return ""
    step = _step(shown)
    bars = []
    for at, refresh in enumerate(shown):
        y = float(_TALL)
        seconds = {**refresh.stages}
        order = [*_STAGES, *(stage for stage in seconds if stage not in _STAGES)]
        title = f"{_moment(refresh.at)}: {refresh.seconds or sum(seconds.values()):,.1f} s; " + ", ".join(
            f"{stage} {seconds[stage]:,.1f} s" for stage in order if seconds.get(stage, 0) >= 0.05
        )
        column = []
        for stage in order:
            high = _TALL * seconds.get(stage, 0.0) / longest
            if high >= 0.2:
                y -= high
                colour = _STAGES.index(stage) if stage in _STAGES else 0
                column.append(
                    f'<rect class="s{colour}" x="{at * step}" y="{y:.1f}" width="{step - _GAP}" height="{high:.1f}"/>'
                )
        bars.append(f"<g><title>{escape(title)}</title>{''.join(column)}</g>")
    used = [stage for stage in _STAGES if any(refresh.stages.get(stage, 0) > longest / 200 for refresh in shown)]
    return _section(
        "How long it took",
        "Seconds of each refresh by stage; the stages are explained in docs/refresh.md.",
        _chart("Seconds by stage and refresh", shown, bars, [(10, f"{longest:,.0f} s"), (_TALL, "0")], tall=_TALL),
        _key([(f"s{_STAGES.index(stage)}", stage) for stage in used]),
    )


def _freshness(report: Report) -> str:
    """Draw how old the data of each publish became, until the next one replaced it."""
    newest_first = report.refreshes[:_COLUMNS]
    until = [report.made_at.timestamp(), *(refresh.at for refresh in newest_first)]
    ages = [
        max(end - datetime.fromisoformat(refresh.source_version).timestamp(), 0)
        for end, refresh in zip(until, newest_first, strict=False)
    ]
    oldest, limit = max(ages), report.spec.freshness
    shown, step = list(reversed(newest_first)), _step(newest_first)
    bars = []
    for at, (refresh, age) in enumerate(zip(shown, reversed(ages), strict=True)):
        high = max(_TALL * age / oldest, 1) if oldest else 1
        now = "now" if at == len(shown) - 1 else "when the next one was published"
        title = f"{refresh.version}, published {_moment(refresh.at)}: its data was {span(age)} old {now}"
        bars.append(
            f'<rect class="{"late" if limit and age > limit else "moved"}" x="{at * step}" y="{_TALL - high:.1f}" '
            f'width="{step - _GAP}" height="{high:.1f}"><title>{escape(title)}</title></rect>'
        )
    keys = [("moved", "age of the data")]
    if limit:
        keys = [("moved", f"up to {span(limit)}, as declared"), ("late", "older")]
    return _section(
        "Freshness",
        "How old the data of each publish was when the next one replaced it. What did not change is not published: a tall bar may be a quiet source.",
        _chart("Age of the data by refresh", shown, bars, [(10, span(oldest)), (_TALL, "0")], tall=_TALL),
        _key(keys),
    )


def _incidents(report: Report) -> str:
    """List what failed, and when the next publish followed."""
    if not report.refreshes and not report.incidents:
        return ""
    lines = "".join(
        f'<tr><td class="t">{_moment(incident.at)}</td><td class="t">{escape(incident.cause)}</td>'
        f'<td class="t {"good" if incident.ended else "bad"}">{_moment(incident.ended) if incident.ended else "not yet"}</td></tr>'
        f'<tr><td class="t w soft" colspan="3">{escape(incident.sentence)}</td></tr>'
        for incident in report.incidents
    )
    head = '<tr><th class="t">when</th><th class="t">what</th><th class="t">published again</th></tr>'
    return _section(
        "Incidents",
        "Runs that failed, the newest first." if lines else "No run of this extract in Dagster's history failed.",
        f'<div class="wide"><table>{head}{lines}</table></div>' if lines else "",
    )


def _verification(report: Report) -> str:
    lines = [
        f'<tr><td class="t">{escape(check.name)}</td><td class="t {"good" if check.passed else "bad"}">{"passed" if check.passed else "failed"}'
        f'</td><td class="t">{_moment(check.at)}</td><td class="t w">{escape(check.text)}</td></tr>'
        for check in report.checks
    ]
    if not lines:
        return ""
    compared = ""
    if report.slices and report.slices_verified is not None:
        compared = f" {report.slices_verified:,} of {report.slices:,} slices were compared with the source as a whole, at some version."
    return _section(
        "Verification",
        f"The newest result of each check. Replaced rows are always compared.{compared}",
        f'<div class="wide"><table>{"".join(lines)}</table></div>',
    )


def _table(refreshes: Sequence[PastRefresh]) -> str:
    body = "".join(
        f'<tr><td class="t">{_moment(refresh.at)}</td><td class="t">{escape(refresh.version)}</td><td class="t">{escape(refresh.decision)}'
        f"{escape(f' ({refresh.reason})') if refresh.reason else ''}</td><td>{_count(refresh.keys)}</td><td>{_count(refresh.rows_purged)}</td>"
        f"<td>{_count(refresh.rows_appended)}</td><td>{refresh.rows:,}</td><td>{_seconds(refresh.seconds)}</td>"
        f'<td class="t w">{escape("; ".join(refresh.warnings))}</td></tr>'
        for refresh in refreshes[:_LISTED]
    )
    more = f"The {_LISTED} newest of {len(refreshes):,}." if len(refreshes) > _LISTED else ""
    return _section(
        "Refreshes",
        more,
        '<div class="wide"><table><tr><th class="t">when</th><th class="t">version</th><th class="t">kind</th><th>keys</th><th>rows removed</th>'
        f'<th>rows added</th><th>rows</th><th>seconds</th><th class="t">warnings</th></tr>{body}</table></div>',
    )


def _section(title: str, text: str, *parts: str) -> str:
    lead = f'<p class="soft">{escape(text)}</p>' if text else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{''.join(parts)}</section>"


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = (
        f'<li><svg width="12" height="12" aria-hidden="true"><rect class="{colour}" width="12" height="12" rx="2"/></svg>{escape(text)}</li>'
        for colour, text in entries
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.1f}"


def _cut(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
