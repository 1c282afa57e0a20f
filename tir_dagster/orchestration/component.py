"""Components for a dg project: an extract or a load declared in a defs.yaml, with the attributes of the YAML spec file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import dagster as dg
from pydantic import BaseModel, RootModel

from tir_dagster.orchestration.build import build_extract_defs
from tir_dagster.orchestration.loads import build_load_defs
from tir_dagster.orchestration.translation import ExtractTranslator, Part
from tir_dagster.spec.declaration import Declaration
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec
from tir_dagster.spec.reading import adapter, declaration_from_mapping

RESOURCES_FILE = "tir_resources.py"
_RESOURCES = '''"""Snowflake, Tableau, Spark and the state folder by environment variables, once for all extracts and loads."""

import dagster as dg
import tir_dagster

defs = dg.Definitions(resources=tir_dagster.environment_resources())
'''


class _Attributes(RootModel[dict[str, Any]]):
    """The attributes as written.

    They are read like a spec file, so that a mistake gives the same message. Editors and `dg` see the schema of the spec.
    """

    declaration: ClassVar[type[Declaration]]

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        schema = adapter(cls.declaration)  # type: ignore[arg-type] # a class can be hashed
        return schema.json_schema(*args, **options)


class ExtractAttributes(_Attributes):
    """The attributes of an extract."""

    declaration = ExtractSpec


class LoadAttributes(_Attributes):
    """The attributes of a load."""

    declaration = LoadSpec


class _Scaffolder(dg.Scaffolder[Any]):
    """Writes a defs.yaml with an example to change, named like its folder, and the resources unless the project has them."""

    def example(self, name: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        folder = request.target_path.parent if request.append else request.target_path
        name = re.sub(r"[^a-z0-9]+", "_", folder.name.lower()).strip("_")
        dg.scaffold_component(request, self.example(name if name[:1].isalpha() else f"my_{name}"))
        defs = next((parent for parent in folder.parents if parent.name == "defs"), folder.parent)
        texts = (file.read_text("utf-8", errors="replace") for file in defs.parent.rglob("*.py"))
        if not (defs / RESOURCES_FILE).exists() and not any("environment_resources" in text for text in texts):
            (defs / RESOURCES_FILE).write_text(_RESOURCES, encoding="utf-8")


class ExtractScaffolder(_Scaffolder):
    """Writes an example of an extract."""

    def example(self, name: str) -> Mapping[str, Any]:
        return {
            "name": name,
            "source": "MYDB.MYSCHEMA.MYTABLE",
            "row_key": "ORDER_ID",
            "slices": {"column": "ORDER_DATE", "by": "month", "start": "2024-12"},
            "changes": {"watermark": "UPDATED_AT", "look_back": "10 minutes"},
            "datasource": {"project": "myproject", "name": name},
        }


class LoadScaffolder(_Scaffolder):
    """Writes an example of a load."""

    def example(self, name: str) -> Mapping[str, Any]:
        return {
            "name": name,
            "table": "MYDB.MYSCHEMA.MYTABLE",
            "files": {"path": f"s3://landing/{name}", "format": "csv"},
            "mode": "merge",
            "key": "ORDER_ID",
            "order_by": "UPDATED_AT",
        }


class _SpecComponent(dg.Component, dg.Resolvable):
    """What both components share: attributes that are read like a spec file, with the file and line of every problem."""

    attributes: ClassVar[type[_Attributes]]

    @classmethod
    def model(cls) -> type[BaseModel]:
        return cls.attributes

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        # Dagster would accept a component without attributes; the spec's reader says which ones are missing.
        return super().load(attributes or cls.attributes({}), context)

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Self:
        value = context.resolve_value(model.model_dump())
        tree = context.source_position_tree
        where, lines = "attributes", None
        if tree is not None:
            where, lines = tree.position.filename, dict(_lines(tree.children.get("attributes", tree)))
        return cls(declaration_from_mapping(cls.attributes.declaration, value, where, lines))  # type: ignore[call-arg]


@dg.scaffold_with(ExtractScaffolder)
@dataclass
class TableauExtractComponent(_SpecComponent):
    """A Tableau extract that stays equal to its Snowflake table while only the changed keys move.

    Gives four assets with their checks, three jobs and two sensors (for the delivery `trigger`: two assets, one job, one
    sensor), and one more sensor with `alerts`. Add the resources once for all extracts, or Dagster says that the resource
    `pyspark` was not provided: `dg.Definitions(resources=tir_dagster.environment_resources())`.
    """

    spec: ExtractSpec
    attributes = ExtractAttributes

    def get_asset_spec(self, part: Part, default: dg.AssetSpec) -> dg.AssetSpec:
        """Override in a subclass to change keys, groups, owners, tags or descriptions."""
        del part
        return default

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        del context
        return build_extract_defs(self.spec, translator=_OfComponent(self))


@dg.scaffold_with(LoadScaffolder)
@dataclass
class FileLoadComponent(_SpecComponent):
    """Files from a folder or a bucket, loaded into a Snowflake table in one transaction; the changed keys are reported.

    Gives two assets, a job and the sensor of arriving files. Extracts on the table follow. Add the resources once:
    `dg.Definitions(resources=tir_dagster.environment_resources())`.
    """

    spec: LoadSpec
    attributes = LoadAttributes

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        del context
        return build_load_defs(self.spec)


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
