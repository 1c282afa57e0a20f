"""Live-to-Hyper datasources for tests: Hyper files to publish, payloads to send, rows to read back."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, CreateMode, Inserter, Nullability, SqlType, TableDefinition, TableName

from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Looker, Publisher

K, V = ("K", SqlType.big_int()), ("V", SqlType.text())
BY_KEY = {"op": "eq", "target-col": "K", "source-col": "K"}


def hyper_file(
    hyper: Any, path: Path, rows: Sequence[Sequence[Any]], columns: Any = (K, V), table: str = "Extract"
) -> Path:
    """A Hyper file with one table in the schema Extract."""
    nullable = Nullability.NULLABLE
    definition = TableDefinition(
        TableName("Extract", table), [TableDefinition.Column(name, kind, nullable) for name, kind in columns]
    )
    with Connection(hyper, path, CreateMode.CREATE_AND_REPLACE) as connection:
        connection.catalog.create_schema("Extract")
        connection.catalog.create_table(definition)
        with Inserter(connection, definition) as inserter:
            inserter.add_rows(rows)
            inserter.execute()
    return path


def action(kind: str, condition: Any = None, *, source: bool = True, **more: Any) -> dict[str, Any]:
    """One action between the tables that hyper_file writes."""
    names = {f"{side}-{part}": "Extract" for side in ("target", "source") for part in ("schema", "table")}
    kept = {name: value for name, value in names.items() if source or name.startswith("target")}
    return {"action": kind, **kept, **({"condition": condition} if condition else {}), **more}


@dataclass(frozen=True)
class LiveData:
    """One live-to-Hyper datasource and its client."""

    publisher: Publisher
    look: Looker
    datasource: Any

    @staticmethod
    def publish(publisher: Publisher, look: Looker, rows: Sequence[Sequence[Any]], name: str = "Live") -> LiveData:
        file = hyper_file(look.hyper, publisher.folder / "live.hyper", rows)
        return LiveData(publisher, look, publisher.publish(file, name, OVERWRITE))

    @property
    def endpoint(self) -> Any:
        return self.publisher.server.datasources

    def payload(self, rows: Sequence[Sequence[Any]], columns: Any = (K, V)) -> str:
        return str(
            hyper_file(self.look.hyper, self.publisher.folder / f"payload-{uuid.uuid4().hex}.hyper", rows, columns)
        )

    def send(self, *actions: Any, request_id: str | None = None, payload: str | None = None, item: Any = None) -> Any:
        """The job as the PATCH answers it."""
        return self.endpoint.update_hyper_data(
            item or self.datasource, request_id=request_id or str(uuid.uuid4()), actions=actions, payload=payload
        )

    def change(self, *actions: Any, payload: str | None = None, item: Any = None) -> Any:
        """The finished job, whatever became of it."""
        return self.publisher.finished(self.send(*actions, payload=payload, item=item).id)

    def rows(self) -> list[list[Any]]:
        return self.look.rows(
            self.publisher.download(self.datasource), 'SELECT * FROM "Extract"."Extract" ORDER BY 1, 2'
        )


def succeeded(job: Any) -> bool:
    return bool(job.finish_code == TSC.JobItem.FinishCode.Success)
