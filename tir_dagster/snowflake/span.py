"""From which version of the source to which: what a detector compares."""

from __future__ import annotations

from dataclasses import dataclass

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.versions import SourceVersion


@dataclass(frozen=True)
class Span:
    """From the version that the extract shows to the one it is brought to."""

    old: SourceVersion
    new: SourceVersion

    def changes(self, table: TableName) -> str:
        """The table's own feed of changes, both images of updates, as what follows FROM."""
        end = self.new.sql.replace("AT(", "END(", 1)
        return f"{table.sql} CHANGES(INFORMATION => DEFAULT) {self.old.sql} {end}"
