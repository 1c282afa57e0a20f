"""What a source sensor sees at a tick: the tables' state by one cheap query, and what is news besides. No Spark."""

from __future__ import annotations

from typing import Any

import dagster as dg

from tir_dagster.orchestration.drift import verified_drift
from tir_dagster.orchestration.metadata import source_metadata
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.pictures import snowflake_url
from tir_dagster.orchestration.probing import SHARED
from tir_dagster.orchestration.resources import SnowflakeParam, probing_access
from tir_dagster.orchestration.upstream import newest_materialization
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.spec.extract import ExtractSpec


def news(instance: dg.DagsterInstance, spec: ExtractSpec, keys: ExtractKeys, confirmed: Confirmation | None) -> str:
    """What came after the version that the extract shows is news, even if the tables were looked at before.

    A hint, an upstream asset that was materialized, drift that a verification found, or a refresh by Tableau that a webhook
    told of: the detection compares what the server shows since then.
    """
    if confirmed is None:
        return ""
    from tir_dagster.orchestration.reported import newest_report  # noqa: PLC0415
    from tir_dagster.orchestration.webhooks import refreshed_elsewhere  # noqa: PLC0415
    from tir_dagster.refresh.survey import watched_tables  # noqa: PLC0415
    from tir_dagster.snowflake.versions import SourceVersion  # noqa: PLC0415

    since = SourceVersion.parse(confirmed.source_version).moment
    told = (
        newest_report(instance, watched_tables(spec), since=since, used=confirmed.reports),
        refreshed_elsewhere(instance, spec, keys.published_datasource, since=since),
        newest_materialization(instance, spec, since=since, used=confirmed.reports),
        verified_drift(instance, keys, confirmed),
    )
    return "".join(f"/{one}" for one in told if one)


def confirmed_state(confirmed: Confirmation | None) -> str | None:
    return f"{confirmed.known.token}/{confirmed.known.definition}{_role(confirmed.known.role)}" if confirmed else None


def _role(role: str | None) -> str:
    return f"/{role}" if role else ""


class Source:
    """The source table, and what is watched with it, at this tick; SourceError when it cannot be read. No Spark."""

    def __init__(self, spec: ExtractSpec, snowflake: SnowflakeParam) -> None:
        from tir_dagster.refresh.survey import (  # noqa: PLC0415
            definition_of,
            role_of,
            watched_tables,
        )
        from tir_dagster.snowflake.versions import combined_token  # noqa: PLC0415

        self._spec = spec
        self._access = probing_access(snowflake, spec)
        self._table, *further = watched_tables(spec)
        probes = SHARED.probe(self._access, [self._table, *further], asker=spec.name)
        self.token = combined_token(probes.items())
        # A spec that changed is a change, too.
        role = "" if spec.delivery == "trigger" else role_of(spec)
        self.state = f"{self.token}/{definition_of(spec)}{_role(role)}"

    def metadata(self) -> dict[str, Any]:
        from tir_dagster.snowflake.versions import describe, describe_held, table_facts  # noqa: PLC0415

        named = self._spec.columns
        columns = describe(self._access, self._table, named) if named else describe_held(self._access, self._table)
        url = snowflake_url(self._access.account, self._access.host, self._table)
        return source_metadata(self.token, columns, rows=table_facts(self._access, self._table).rows, url=url)
