"""The ways that compete, as the tables show them: what each reads, and what it cannot do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SCATTERED, RECENT = "scattered", "recent"
SCENARIOS = {
    SCATTERED: "changes in all months: inserts, updates, moves to another month, deletes",
    RECENT: "the same kinds of changes, in the newest two months only",
}
OURS, TABLEAU, OTHERS = "tir_dagster", "Tableau itself", "other tools and scripts"


@dataclass(frozen=True)
class Way:
    """One way to bring a published extract up to date after a change.

    `datasource` says what it begins with: one of Tableau's with incremental refresh set up (`tableau`), a Hyper file that its
    script has kept (`local`), or nothing.
    """

    name: str
    title: str
    family: str
    cannot: str = ""
    delivery: str = ""
    detector: str = "watermark"
    refresh: str = "by_key"
    datasource: str = ""
    scenarios: tuple[str, ...] = (SCATTERED,)

    @property
    def shown_name(self) -> str:
        """The name of its datasource."""
        return f"contest_{self.name}"


BOTH = (SCATTERED, RECENT)
_NOTHING_OLD = "updates, deletes and moves of rows that it has read: it only adds rows"
WAYS = (
    Way("republish_watermark", "republish, watermark", OURS, delivery="republish", scenarios=BOTH),
    Way("republish_feed", "republish, feed", OURS, delivery="republish", detector="feed"),
    Way("republish_diff", "republish, diff", OURS, delivery="republish", detector="diff"),
    Way("patch", "patch, watermark", OURS, delivery="patch", scenarios=BOTH),
    Way("server", "server, watermark", OURS, delivery="server", datasource="tableau", scenarios=BOTH),
    Way("trigger", "trigger of Tableau's full refresh", OURS, delivery="trigger", datasource="tableau"),
    Way("full", "full refresh", OURS, delivery="republish", refresh="full", scenarios=BOTH),
    Way("tableau_full", "full refresh", TABLEAU, datasource="tableau", scenarios=BOTH),
    Way("tableau_incremental", "incremental refresh", TABLEAU, _NOTHING_OLD, datasource="tableau", scenarios=BOTH),
    Way(
        "script_2021",
        "script of 2021: unzip, DELETE by range, deflate, refresh",
        OTHERS,
        "changes before its range, and rows without a date",
        datasource="tableau",
        scenarios=BOTH,
    ),
    Way("pandas_all", "pandas and Hyper's Inserter, all rows", OTHERS),
    Way("pandas_changed", "pandas and Hyper's Inserter, changed rows", OTHERS, "deletes", datasource="local", scenarios=BOTH),
    Way("pantab_all", "pantab, all rows", OTHERS),
    Way("pantab_append", "pantab, changed rows appended", OTHERS, "updates, deletes, moves: it cannot remove rows", datasource="local"),
    Way("hyperleaup_all", "hyperleaup's steps, all rows", OTHERS),
)  # fmt: skip
BY_NAME = {way.name: way for way in WAYS}
