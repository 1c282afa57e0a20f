"""docs/bad-inputs.md: a section for each area, written from the cases."""

from __future__ import annotations

from pathlib import Path

from tir_dagster_tests.bad_inputs import contents, declared, servers, star

DOCS = Path(__file__).parents[2] / "docs" / "bad-inputs.md"
CASES = [*declared.CASES, *star.CASES, *servers.CASES, *contents.CASES]
AREAS = tuple(dict.fromkeys(case.area for case in CASES))
HEAD = """\
# Bad inputs: what you read, and what is unchanged

Every row is played by a test, and the messages are the real ones (`make docs-tables` writes them anew). Words in capitals, such as
FOLDER or PORT, stand for what differs from machine to machine. The last column says what the test compared before and after:
"no server was asked" means that neither Snowflake nor Tableau got a call.
"""
COLUMNS = "| what was done | what you read | unchanged |\n|---|---|---|"


def section(area: str, rows: list[str]) -> str:
    return "\n".join([f"## {area}", "", COLUMNS, *rows, ""])


def sections() -> dict[str, str]:
    """The sections as the file has them."""
    if not DOCS.exists():
        return {}
    _, *parts = DOCS.read_text(encoding="utf-8").split("\n## ")
    return {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in parts}


def write(area: str, text: str) -> None:
    """Replace one section, and keep the order of the areas."""
    known = {**sections(), area: text}
    DOCS.write_text("\n".join([HEAD, *(known[name] for name in AREAS if name in known)]), encoding="utf-8")
