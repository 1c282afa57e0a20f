"""Extracts as this company wants to see them: grouped and owned by the team in whose folder they are."""

from dataclasses import dataclass

import dagster as dg

from tir_dagster import TableauExtractComponent


@dataclass
class TeamExtract(TableauExtractComponent):
    """An extract of a team; the datasource's project names the team."""

    def get_asset_spec(self, part: str, default: dg.AssetSpec) -> dg.AssetSpec:  # noqa: ARG002 - every part looks alike
        """Group the assets by team and name the team as their owner."""
        team = self.spec.datasource.project.partition("/")[0].lower()
        return default.replace_attributes(group_name=team, owners=[f"team:{team}"])
