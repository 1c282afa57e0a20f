"""TableauExtractComponent: an extract declared in a dg project's defs.yaml, with the attributes of the YAML spec file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import dagster as dg
from pydantic import BaseModel, RootModel

from tir_dagster.orchestration.build import build_extract_defs
from tir_dagster.orchestration.translation import ExtractTranslator, Part
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import adapter, spec_from_mapping

_EXAMPLE = {
    "name": "orders",
    "source": "MYDB.MYSCHEMA.MYTABLE",
    "row_key": "ORDER_ID",
    "slices": {"column": "ORDER_DATE", "by": "month", "start": "2024-12"},
    "changes": {"watermark": "UPDATED_AT", "look_back": "10 minutes"},
    "datasource": {"project": "myproject", "name": "mydatasource"},
}


class ExtractAttributes(RootModel[dict[str, Any]]):
    """The attributes as written.

    They are read like a spec file, so that a mistake gives the same message. Editors and `dg` see the schema of the spec.
    """

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return adapter(ExtractSpec).json_schema(*args, **options)


class ExtractScaffolder(dg.Scaffolder[Any]):
    """Writes a defs.yaml with an example to change."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        dg.scaffold_component(request, _EXAMPLE)


@dg.scaffold_with(ExtractScaffolder)
@dataclass
class TableauExtractComponent(dg.Component, dg.Resolvable):
    """A Tableau extract that stays equal to its Snowflake table while only the changed keys move.

    Gives four assets with their checks, five jobs and two sensors (for the delivery `trigger`: two assets, one job, one
    sensor), and one more sensor with `alerts`. Add the resources once for all extracts:
    `dg.Definitions(resources=tir_dagster.environment_resources())`.
    """

    spec: ExtractSpec

    @classmethod
    def model(cls) -> type[BaseModel]:
        return ExtractAttributes

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        # Dagster would accept a component without attributes; the spec's reader says which ones are missing.
        return super().load(attributes or ExtractAttributes({}), context)

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Self:
        attributes = context.resolve_value(model.model_dump())
        tree = context.source_position_tree
        if tree is None:
            return cls(spec_from_mapping(attributes, "attributes"))
        return cls(
            spec_from_mapping(
                attributes, tree.position.filename, lines=dict(_lines(tree.children.get("attributes", tree)))
            )
        )

    def get_asset_spec(self, part: Part, default: dg.AssetSpec) -> dg.AssetSpec:
        """Override in a subclass to change keys, groups, owners, tags or descriptions."""
        del part
        return default

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        del context
        return build_extract_defs(self.spec, translator=_OfComponent(self))


@dataclass(frozen=True)
class _OfComponent(ExtractTranslator):
    component: TableauExtractComponent

    def get_asset_spec(self, extract: ExtractSpec, part: Part, default: dg.AssetSpec) -> dg.AssetSpec:
        del extract
        return self.component.get_asset_spec(part, default)


def _lines(tree: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the path and the line number of each attribute."""
    yield path, tree.position.start.line
    for name, inner in tree.children.items():
        yield from _lines(inner, f"{path}.{name}" if path else str(name))
