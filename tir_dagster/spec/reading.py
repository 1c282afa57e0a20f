"""Reads spec files, components of a dg project or mappings into extracts and loads, with the line of every problem; the JSON schema."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Strict, TypeAdapter, ValidationError

from tir_dagster.errors import SpecError
from tir_dagster.spec.declaration import Declaration
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec, problems_between
from tir_dagster.spec.spark import SparkSpec

T = TypeVar("T", bound=Declaration)
SPECS_VARIABLE = "TIR_SPECS"
COMPONENT_FILE = "defs.yaml"


@dataclass(frozen=True)
class Declared(Declaration):
    """What a spec file declares."""

    extracts: Annotated[tuple[ExtractSpec, ...], Strict(False)] = ()
    """Tableau extracts that stay equal to their Snowflake tables."""
    loads: Annotated[tuple[LoadSpec, ...], Strict(False)] = ()
    """Files to load into Snowflake tables."""
    spark: SparkSpec | None = None
    """Which Spark runs the tasks of all of them; left out, one on this machine."""

    def problems(self) -> Iterator[tuple[str, str]]:
        # A name is given once in the whole file, because it names assets.
        names: set[str] = set()
        for at, extract in enumerate(self.extracts):
            if extract.name in names:
                yield f"extracts[{at}].name", f"a second extract is named {extract.name!r}; names are unique"
            names.add(extract.name)
        for at, load in enumerate(self.loads):
            if load.name in names:
                yield f"loads[{at}].name", f"{load.name!r} is another's name; names are unique in the file"
            names.add(load.name)
        yield from self._datasource_problems()
        for message in problems_between(self.loads):
            yield "loads", message

    def _datasource_problems(self) -> Iterator[tuple[str, str]]:
        """Refuse two extracts on one datasource: each would take the other's publish for a foreign one, again and again."""
        owners: dict[tuple[str | None, ...], str] = {}
        for extract in self.extracts:
            place = extract.datasource
            owner = owners.setdefault((place.server, place.site, place.project.strip("/ "), place.name), extract.name)
            if owner != extract.name:
                message = (
                    f"have the same datasource, {place.name!r} in project {place.project!r}; give each extract its own"
                )
                yield "extracts", f"{owner} and {extract.name} {message}"


def load_specs(path: str | os.PathLike[str] | None = None) -> tuple[ExtractSpec, ...]:
    """Return the extracts declared in a YAML file (default: the one TIR_SPECS names); raise SpecError with what to repair, and where."""
    return load_declared(path).extracts


def load_declared(path: str | os.PathLike[str] | None = None) -> Declared:
    """Return all that a YAML file, or the components below a folder of a dg project, declare (default: what TIR_SPECS names).

    Raises SpecError with what to repair, and where.
    """
    chosen = path or os.environ.get(SPECS_VARIABLE)
    if not chosen:
        return Declared()
    file = Path(chosen)
    if file.is_dir():
        return _of_components(sorted(file.rglob(COMPONENT_FILE)), file)
    return _of_components([file], file) if file.name == COMPONENT_FILE else parse_declared(_text(file), str(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"{file}: {error.strerror or error}. Name the spec file with --specs or {SPECS_VARIABLE}."
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{file}: not text in UTF-8. Save the spec file as UTF-8.") from error


def _of_components(files: Sequence[Path], place: Path) -> Declared:
    """Return what components declare; those of other classes are passed over, subclasses of ours are not."""
    extracts: list[ExtractSpec] = []
    loads: list[LoadSpec] = []
    for file in files:
        text = _text(file)
        try:
            nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node]
        except yaml.YAMLError as error:
            raise SpecError(_not_yaml(str(file), error)) from error
        for node in nodes:
            lines: dict[str, int] = {}
            twice: list[str] = []
            document = _plain(node, "", lines, twice)
            attributes = document.get("attributes") if isinstance(document, dict) else None
            names = set(attributes) if isinstance(attributes, dict) else set()
            if not names >= {"datasource"} and not names >= {"table", "files"}:
                continue
            if "{{" in text[node.start_mark.index : node.end_mark.index]:
                raise SpecError(
                    f"{file}: only dg fills in `{{{{ … }}}}`. Write the value itself, for credentials the name of a variable"
                    " (`username_env`, `password_env`), or refresh the extract in Dagster."
                )
            below = {name.removeprefix("attributes."): line for name, line in lines.items()}
            again = [name.removeprefix("attributes.") for name in twice]
            if "datasource" in names:
                extracts.append(_read(ExtractSpec, attributes, str(file), below, again))
            else:
                loads.append(_read(LoadSpec, attributes, str(file), below, again))
    if not extracts and not loads:
        raise SpecError(f"{place}: no {COMPONENT_FILE} there declares an extract or a load. Name another folder.")
    declared = Declared(tuple(extracts), tuple(loads))
    if problems := list(declared.problems()):
        raise SpecError("\n".join(f"{place}: {problem}." for _, problem in problems))
    return declared


def parse_specs(text: str, file: str) -> tuple[ExtractSpec, ...]:
    return parse_declared(text, file).extracts


def parse_declared(text: str, file: str) -> Declared:
    lines: dict[str, int] = {}
    twice: list[str] = []
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        document = _plain(tree, "", lines, twice) if tree is not None else None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(_not_yaml(file, error)) from error
    except RecursionError as error:
        raise SpecError(f"{file}: an anchor contains itself, or values are nested too deep. Flatten it.") from error
    if not isinstance(document, dict) or not any(
        isinstance(document.get(name), list) for name in ("extracts", "loads")
    ):
        raise SpecError(_placed("", "start with `extracts:` and a list of extracts below it", file, lines))
    return _read(Declared, document, file, lines, twice)


def spec_from_mapping(value: Mapping[str, Any], where: str) -> ExtractSpec:
    return declaration_from_mapping(ExtractSpec, value, where)


def declaration_from_mapping(
    cls: type[T], value: Mapping[str, Any], where: str, lines: Mapping[str, int] | None = None
) -> T:
    """The extract or load for attributes that come from elsewhere, such as a component; `lines` by field: `slices.by`."""
    return _read(cls, _with_text_keys(value), where, lines or {})


def spark_from_mapping(value: Mapping[str, Any]) -> SparkSpec:
    """Return the block `spark:` that is given in code instead of a spec file."""
    return _read(SparkSpec, _with_text_keys(value), "spark", {})


def _with_text_keys(value: Any) -> Any:
    """The value with all names as texts, as in a spec file."""
    if isinstance(value, Mapping):
        return {str(name): _with_text_keys(inner) for name, inner in value.items()}
    return value


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of spec files, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **adapter(Declared).json_schema(),
        "title": "tir_dagster",
    }


@cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Return what reads and describes the class; made once, because that takes longer than a read."""
    return TypeAdapter(cls)


def _read(cls: type[T], value: Any, file: str, lines: Mapping[str, int], twice: Sequence[str] = ()) -> T:
    problems = [(path, "given twice; keep one") for path in twice]
    try:
        declaration: T = adapter(cls).validate_python(value)  # type: ignore[arg-type] # a class can be hashed
    except ValidationError as error:
        problems += [(_path(one["loc"]), one["msg"]) for one in error.errors()]
    if problems:
        raise SpecError("\n".join(_placed(path, message, file, lines) for path, message in problems))
    return declaration


def _path(place: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def _placed(path: str, message: str, file: str, lines: Mapping[str, int]) -> str:
    line = lines.get(path) or lines.get(path.rpartition(".")[0])
    return (
        f"{f'{file}:{line}' if line else file}: {path or 'the file'}: {message}{'' if message.endswith('?') else '.'}"
    )


def _not_yaml(file: str, error: Exception) -> str:
    """The parser's message of many lines as one sentence."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{file}:{mark.line + 1}" if mark else file
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return f"{place}: not YAML: {' '.join(str(problem).split())}. Check indentation (spaces, no tabs), brackets and quotes there."


def _plain(node: yaml.Node, path: str, lines: dict[str, int], twice: list[str]) -> Any:
    """Return the node's value; record in `lines` the line of each field, in `twice` the repeated ones."""
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            if str(key.value) in values:
                twice.append(inner)
            values[str(key.value)] = _plain(value, inner, lines, twice)
            lines[inner] = key.start_mark.line + 1
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{path}[{at}]", lines, twice) for at, item in enumerate(node.value)]
    # Dates and sexagesimal numbers stay what the user wrote: `start: 2024-12` is text here.
    if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str"):
        return node.value
    return yaml.SafeLoader("").construct_object(node)
