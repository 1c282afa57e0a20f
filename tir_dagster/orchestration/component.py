"""TableauExtractComponent: an extract declared in a dg project's defs.yaml, with the attributes of the YAML spec file."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import dagster as dg
from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from tir_dagster.orchestration.extracts import build_extract_defs
from tir_dagster.orchestration.translation import ExtractTranslator, Part
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping

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

    The spec's own reader checks them, so that a mistake gives the same message as in a spec file. Editors and `dg` see a
    schema that is derived from the spec.
    """

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        return _twin(ExtractSpec).model_json_schema(*args, **options)


class ExtractScaffolder(dg.Scaffolder[Any]):
    """Writes a defs.yaml with an example to change."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        dg.scaffold_component(request, _EXAMPLE)


@dg.scaffold_with(ExtractScaffolder)
@dataclass
class TableauExtractComponent(dg.Component, dg.Resolvable):
    """A Tableau extract that stays equal to its Snowflake table while only the changed keys move.

    Gives four assets with their checks, three jobs and two sensors (for the delivery `trigger`: two assets, one job, one
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


def _twin(cls: type[Any]) -> type[BaseModel]:
    """Build a model with the fields of a spec's dataclass; it is used only for its schema."""
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {
        field.name: (_schema_type(hints[field.name], field.metadata), _default(field))
        for field in dataclasses.fields(cls)
    }
    model: type[BaseModel] = create_model(
        cls.__name__, __config__=ConfigDict(extra="forbid"), __doc__=cls.__doc__, **fields
    )
    return model


def _schema_type(hint: Any, metadata: Mapping[str, Any]) -> Any:
    if metadata.get("duration"):
        return float | str
    if metadata.get("size"):
        return str | None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [member for member in typing.get_args(hint) if member is not type(None)]
        return _schema_type(inner[0], metadata) | None
    if origin is tuple:
        return str | list[str]
    if origin is collections.abc.Mapping:
        return dict[str, _schema_type(typing.get_args(hint)[1], {})]  # type: ignore[misc]
    if origin is Literal:
        return hint
    return _twin(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else hint


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        # The spec's reader requires one of the two.
        return Field(default="") if "unless" in field.metadata else Field()
    if field.default is dataclasses.MISSING:
        return Field(default=None)
    if dataclasses.is_dataclass(field.default) or isinstance(field.default, tuple):
        # Optional in the schema; the spec has the defaults.
        return Field(default=None)
    return Field(default=field.default)
