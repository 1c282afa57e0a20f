"""What a run writes: its numbers as JSON, tables as Markdown, plots; and the parts of README and docs that are made of them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contest_report import Contest, short_table
from tir_dagster.errors import TirError

if TYPE_CHECKING:
    from benchmarks.growth import Growth
    from benchmarks.report import Report
    from benchmarks.star import StarReport
    from benchmarks.starts import Starts

ROOT = Path(__file__).resolve().parents[1]
BUILD, DOCS = Path("build/benchmarks"), ROOT / "docs" / "benchmarks"
README, MEASURING, SCALE = ROOT / "README.md", ROOT / "docs" / "measuring.md", ROOT / "docs" / "scale.md"
STAR = ROOT / "docs" / "star.md"


# Where no run has been written down: numbers come from a run, or there are none.
NOT_YET = "No run is recorded yet."


def filled(text: str, name: str, content: str) -> str:
    """The text with this between the two comments of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise TirError(f"There is no place for {name}: write {begin} and {end}.")
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text)


def contest_page(contest: Contest) -> str:
    return f"# The contest\n\n`python -m benchmarks contest` wrote this page from `contest.json`.\n\n{contest.as_text()}\n\n![The same as bars](contest.svg)\n"


def contest_excerpt(contest: Contest | None) -> str:
    """What the README shows."""
    if contest is None:
        return NOT_YET
    asked = contest.asked
    command = f"python -m benchmarks contest --rows {asked['rows']} --changed {asked['changed']:g} --repetitions {asked['repetitions']}"
    told = (
        f"`{command}` ({contest.date[:10]}, {contest.machine['cores']} cores; [all ways](docs/benchmarks/contest.md)):"
    )
    table = textwrap.indent(short_table(contest), "    ")
    return f"{told}\n\n{table}\n\n![The contest as bars](docs/benchmarks/contest.png)"


def write_contest(contest: Contest, *, in_docs: bool) -> Path:
    """Write the page, its numbers and plots; in the docs, also the README's excerpt. Return the page."""
    from benchmarks.plots import draw_contest

    folder = _folder(in_docs=in_docs)
    _write_json(folder / "contest.json", contest.as_dict())
    (folder / "contest.md").write_text(contest_page(contest), encoding="utf-8")
    draw_contest(contest, folder)
    if in_docs:
        _fill(README, "contest", contest_excerpt(contest))
    return folder / "contest.md"


def write_growth(growth: Growth, *, in_docs: bool) -> Path:
    from benchmarks.plots import draw_growth

    folder = _folder(in_docs=in_docs)
    _write_json(folder / "growth.json", growth.as_dict())
    (folder / "growth.md").write_text(growth_page(growth), encoding="utf-8")
    draw_growth(growth, folder)
    if in_docs:
        _fill(SCALE, "scale", scale_excerpt(growth))
        fill_goals()
    return folder / "growth.md"


def write_stages(report: Report, setting: Mapping[str, Any], *, in_docs: bool) -> Path:
    """Write the stages of one run beside their limits, and the goals with what was reached, as the command prints them."""
    folder = _folder(in_docs=in_docs)
    _write_json(folder / "stages.json", {**setting, "report": asdict(report)})
    (folder / "stages.md").write_text(stages_page(report, setting), encoding="utf-8")
    if in_docs:
        _fill(MEASURING, "stages", stages_excerpt(report))
        fill_goals()
    return folder / "stages.md"


def stages_page(report: Report, setting: Mapping[str, Any]) -> str:
    from benchmarks.machine import setting_lines

    command = f"python -m benchmarks --rows {report.rows} --changed {report.changed:g}"
    head = f"# Stages beside their limits\n\n`{command}` wrote this page from `stages.json`."
    machine = "\n".join(setting_lines(setting["machine"], setting["versions"], setting["date"]))
    return f"{head}\n\n{machine}\n\n{textwrap.indent(report.as_text(), '    ')}\n"


def stages_excerpt(report: Report) -> str:
    """What docs/measuring.md shows: the refresh by key."""
    sections = report.as_text().split("\n\n")
    shown = [text for text in sections if text.startswith("Refresh by key, republish")]
    command = f"Of {report.rows:,} orders, on {report.cores} cores, `make bench ROWS={report.rows}` said"
    return f"{command}\n\n{textwrap.indent(chr(10).join(shown), '    ')}"


def write_starts(starts: Starts, *, in_docs: bool) -> Path:
    from benchmarks.machine import setting_lines

    folder = _folder(in_docs=in_docs)
    _write_json(folder / "starts.json", starts.as_dict())
    head = "# Starts\n\n`python -m benchmarks starts` wrote this page from `starts.json`."
    machine = "\n".join(setting_lines(starts.machine, starts.versions, starts.date))
    page = f"{head}\n\n{machine}\n\n{textwrap.indent(starts.as_text(), '    ')}\n"
    (folder / "starts.md").write_text(page, encoding="utf-8")
    if in_docs:
        fill_goals()
    return folder / "starts.md"


def write_star(report: StarReport, *, in_docs: bool) -> Path:
    folder = _folder(in_docs=in_docs)
    _write_json(folder / "star.json", report.as_dict())
    (folder / "star.md").write_text(star_page(report), encoding="utf-8")
    if in_docs:
        _fill(STAR, "star", star_excerpt(report))
    return folder / "star.md"


def star_page(report: StarReport) -> str:
    from benchmarks.machine import setting_lines

    command = f"python -m benchmarks star --facts {report.asked['facts']}"
    head = f"# One dimension row: joined extract and star\n\n`{command}` wrote this page from `star.json`."
    machine = "\n".join(setting_lines(report.machine, report.versions, report.date))
    return f"{head}\n\n{machine}\n\n{textwrap.indent(report.as_text(), '    ')}\n"


def star_excerpt(report: StarReport | None) -> str:
    """What docs/star.md shows."""
    if report is None:
        return NOT_YET
    command = f"python -m benchmarks star --facts {report.asked['facts']}"
    told = f"`{command}` ({report.date[:10]}, {report.machine['cores']} cores, on the stand-ins):"
    return f"{told}\n\n{textwrap.indent(report.as_text(), '    ')}"


def fill_goals() -> None:
    """Write the goals beside what the recorded runs reached: a page, and the README's table."""
    recorded = (read_stages(), read_growth(), read_starts())
    _fill(README, "goals", goals_excerpt(*recorded))
    if any(recorded):
        (_folder(in_docs=True) / "goals.md").write_text(goals_page(*recorded), encoding="utf-8")


def goals_page(report: Report | None, growth: Growth | None, starts: Starts | None) -> str:
    from benchmarks.goals import goals_table

    table = goals_table(report, growth, starts)
    return f"# Goals\n\nThe runs that `python -m benchmarks` has recorded in this folder wrote this page.\n\n{table}\n"


def goals_excerpt(report: Report | None, growth: Growth | None, starts: Starts | None) -> str:
    """What the README shows."""
    from benchmarks.goals import goals_table

    if not any((report, growth, starts)):
        return NOT_YET
    table = goals_table(report, growth, starts, short=True)
    return f"The goals beside what was reached ([all detectors](docs/benchmarks/goals.md)):\n\n{table}"


def read_stages() -> Report | None:
    from benchmarks.report import Report

    file = DOCS / "stages.json"
    return Report.from_dict(json.loads(file.read_text(encoding="utf-8"))["report"]) if file.is_file() else None


def read_starts() -> Starts | None:
    from benchmarks.starts import Starts

    file = DOCS / "starts.json"
    return Starts.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def read_star() -> StarReport | None:
    from benchmarks.star import StarReport

    file = DOCS / "star.json"
    return StarReport.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def growth_page(growth: Growth) -> str:
    return f"# Growth\n\n`python -m benchmarks --growth` wrote this page from `growth.json`.\n\n{growth.as_markdown()}\n\n![The same as lines](growth.svg)\n"


def read_contest() -> Contest | None:
    """The run that the docs show, if there is one."""
    file = DOCS / "contest.json"
    return Contest.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def read_growth() -> Growth | None:
    from benchmarks.growth import Growth

    file = DOCS / "growth.json"
    return Growth.from_dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def scale_excerpt(growth: Growth | None) -> str:
    """The tables of docs/scale.md."""
    from benchmarks.scale import scale_tables

    return NOT_YET if growth is None else scale_tables(growth)


def _folder(*, in_docs: bool) -> Path:
    folder = DOCS if in_docs else BUILD.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _fill(page: Path, name: str, content: str) -> None:
    page.write_text(filled(page.read_text(encoding="utf-8"), name, content), encoding="utf-8")
