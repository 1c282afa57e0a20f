"""The rooms of the package and their order, read from the imports in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tir_dagster"
DOCS = PACKAGE.parent / "docs" / "architecture.md"
# A room may import the rooms above it, and itself.
ORDER = (
    {"addresses"},
    {"errors"},
    {"crash_points", "files", "measuring", "retries", "trust"},
    {"background", "s3"},
    {"snowflake"},
    {"spec"},
    {"spark"},
    {"loading", "changes"},
    {"hyper"},
    {"tableau"},
    {"refresh", "probe"},
    {"alerts"},
    {"orchestration"},
    {"definitions"},
    {"cli"},
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
# Packages whose import takes a twentieth of a second or more: how long on its own (`python -X importtime`, bytecode and
# files cached), and which others of them it loads. The same table is in docs/architecture.md.
HEAVY: dict[str, tuple[float, tuple[str, ...]]] = {
    "dagster_snowflake": (2.89, ("dagster", "requests", "snowflake.connector", "sqlalchemy")),
    "dagster_pyspark": (0.44, ("dagster", "pyspark")),
    "dagster_slack": (0.43, ("dagster", "slack_sdk")),
    "snowflake.connector": (0.43, ("boto3", "pandas")),
    "pyspark.sql.connect": (0.36, ("pyspark", "pandas")),
    "dagster": (0.33, ()),
    "moto": (0.30, ("boto3", "requests")),
    "pandas": (0.22, ("pyarrow",)),
    "boto3": (0.11, ("botocore",)),
    "sqlalchemy": (0.11, ()),
    # Half of Dagster's daemon, beyond `import dagster`.
    "dagster._core.execution.backfill": (0.09, ()),
    "tableauserverclient": (0.08, ("requests",)),
    "botocore": (0.08, ()),
    "numpy": (0.08, ()),
    "pyspark": (0.07, ()),
    "tableaudocumentapi": (0.07, ()),
    "pyarrow": (0.06, ("numpy",)),
    # Not from the cache: it maps a library of 43 MB, which takes 18 MB of memory in every process that imports it.
    "tableauhyperapi": (0.05, ()),
    "requests": (0.05, ()),
    "slack_sdk": (0.05, ()),
    "sqlglot": (0.05, ()),
    "rich": (0.05, ()),
}
# What `tir --help` loads answers at once: its commands import their modules when they run.
COMMAND_LINE = "tir_dagster.cli.main"
# Imports inside functions that stay there for another reason than start-up time.
LATE = {
    ("tir_dagster.sandbox.storage.app", "starlette.middleware.wsgi"): "its import warns, which is silenced there",
    ("tir_dagster.spark.places", "fsspec"): "executors have it only where the staging place needs it",
}
MAY_IMPORT_DAGSTER = {"orchestration", "definitions", "cli"}
MOST_MODULES = 16


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name; the sandbox is a program of its own."""
    named = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text(encoding="utf-8"))
    return named


def imports(module: str, *, types: bool = True) -> Iterator[str]:
    """The modules that a module imports anywhere in its text; `types` says whether those for annotations count."""
    tree = modules()[module]
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_types and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE.name and len(parts) > 1 else ""


def in_rooms() -> list[str]:
    """The modules that belong to a room; the package's own `__init__` offers the public names of all of them."""
    return [module for module in modules() if room_of(module) not in ("", "sandbox")]


def test_every_module_is_in_a_room_of_the_order():
    assert {room_of(module) for module in in_rooms()} == set(RANK)


def test_a_room_imports_only_rooms_above_it():
    wrong = [
        f"{module} imports {other}"
        for module in in_rooms()
        for other in imports(module)
        if (theirs := room_of(other)) not in ("", "sandbox")
        and theirs != room_of(module)
        and RANK[theirs] >= RANK[room_of(module)]
    ]
    assert wrong == []


def test_no_two_modules_need_each_other():
    graph = {module: {other for other in imports(module, types=False) if other in modules()} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"modules that import each other: {' → '.join(error.args[1])}") from None


def test_only_three_rooms_know_dagster():
    knowing = {
        room_of(module)
        for module in in_rooms()
        for other in imports(module)
        if other.split(".")[0].startswith("dagster")
    }
    assert knowing <= MAY_IMPORT_DAGSTER


def test_the_sandbox_is_reached_over_http_and_started_by_the_command_line_alone():
    sandbox = [module for module in modules() if room_of(module) == "sandbox"]
    assert {room_of(other) for module in sandbox for other in imports(module)} <= {"", "sandbox", "background"}
    starting = {room_of(module) for module in in_rooms() for other in imports(module) if room_of(other) == "sandbox"}
    assert starting <= {"cli"}


def test_no_room_is_a_drawer():
    folders = {file.parent for file in PACKAGE.rglob("*.py") if "sandbox" not in file.parts}
    crowded = {
        str(folder.relative_to(PACKAGE)): count
        for folder in folders
        if (count := len([file for file in folder.glob("*.py") if not file.name.startswith("__")])) > MOST_MODULES
    }
    assert crowded == {}


def test_every_module_says_in_its_first_line_what_belongs_in_it():
    silent = [name for name, tree in modules().items() if not ast.get_docstring(tree)]
    assert silent == []


def picture() -> str:
    """The rooms and which they import, as a diagram in Mermaid's language; what an edge's rooms reach anyway is left out."""
    rooms = [room for rooms in ORDER for room in sorted(rooms) if (PACKAGE / room).is_dir()]
    direct = {
        room: {room_of(other) for module in in_rooms() if room_of(module) == room for other in imports(module)}
        & set(rooms) - {room}
        for room in rooms
    }
    edges = [
        f"    {other} --> {room}"
        for room in rooms
        for other in sorted(direct[room], key=rooms.index)
        if not any(other in direct[between] for between in direct[room])
    ]
    return "\n".join(["flowchart TD", *edges, "    cli -. HTTP .-> sandbox"])


def test_the_picture_in_the_docs_is_that_of_the_imports():
    assert f"```mermaid\n{picture()}\n```" in DOCS.read_text(encoding="utf-8"), f"write it anew:\n{picture()}"


def test_the_docs_tell_of_every_room():
    text = DOCS.read_text(encoding="utf-8")
    named = [str(folder.relative_to(PACKAGE)) for folder in PACKAGE.rglob("*") if (folder / "__init__.py").is_file()]
    rooms = [name for name in named if not name.startswith("sandbox/")]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_the_docs_name_only_modules_that_exist():
    text = DOCS.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))
    assert [
        path for path in sorted(paths) if not any((folder / path).is_file() for folder in (PACKAGE, PACKAGE.parent))
    ] == []


def test_no_module_imports_a_test_module():
    """What several files of tests use is in a helper module: a file of tests is read, run and deleted alone."""
    folders = (Path(__file__).parent, PACKAGE, PACKAGE.parent / "benchmarks")
    imported = [
        f"{file.relative_to(PACKAGE.parent)} imports {name}"
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        for name in imported_names(ast.parse(file.read_text(encoding="utf-8")))
        if re.match(r"tir_dagster_tests\..*\btest_", name)
    ]
    assert imported == []


def imported_names(tree: ast.Module) -> Iterator[str]:
    """The modules that a text names in its imports, and those that may be behind the names it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The imports that run, and whether each is inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, inside
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from statements(node, inside=inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def run_imports(module: str, *, inside: bool) -> frozenset[str]:
    """The modules that a module imports in its functions, or else when it is imported itself."""
    return frozenset(
        name if name in modules() else name.rpartition(".")[0]
        for node, is_inside in statements(modules()[module])
        if is_inside is inside
        for name in (
            [f"{alias.name}." for alias in node.names]
            if isinstance(node, ast.Import)
            else [f"{node.module}.{alias.name}" for alias in node.names]
        )
    )


def heavy(package: str) -> set[str]:
    """The heavy packages that importing one from outside loads: itself, and what it loads in turn."""
    names = {name for name in HEAVY if f"{package}.".startswith(f"{name}.")}
    return names.union(*(heavy(other) for name in names for other in HEAVY[name][1]))


@cache
def reached(module: str) -> frozenset[str]:
    """Every module that importing one runs, itself included; of those from outside only the ones that the project names."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        found.add(name)
        if name in modules():
            # With a module come the packages that it is in.
            waiting |= {*run_imports(name, inside=False), *filter(None, [name.rpartition(".")[0]])} - found
    return frozenset(found)


def loaded(module: str) -> set[str]:
    """The heavy packages that importing a module loads."""
    return set().union(*(heavy(name) for name in reached(module) - set(modules())))


def saves_start_up_time(module: str, other: str) -> bool:
    """Tell if importing `other` at the top would load a heavy package, or for `tir --help` a module that no help needs."""
    helping = reached(COMMAND_LINE)
    in_help = room_of(module) == "cli" and module in helping and other in modules() and other not in helping
    return in_help or bool(loaded(other) - loaded(module))


def test_an_import_inside_a_function_saves_start_up_time():
    needless = [
        f"{module} imports {other}"
        for module in modules()
        for other in sorted(run_imports(module, inside=True))
        if not saves_start_up_time(module, other) and (module, other) not in LATE
    ]
    assert needless == [], "import them at the top: nothing starts faster without them"


def test_the_docs_show_the_heavy_packages():
    rows = "\n".join(f"| `{name}` | {seconds:.2f} |" for name, (seconds, _) in HEAVY.items())
    assert rows in DOCS.read_text(encoding="utf-8"), f"write them anew:\n{rows}"


def test_names_and_literals_are_quoted_in_one_place():
    """`snowflake/names.py` quotes for Snowflake, `hyper/engine.py` for Hyper: elsewhere nobody doubles quotes."""
    doubling = re.compile(r"""replace\(\s*(["'])(?:'|"|\\'|\\")\1,\s*(["'])(?:''|""|\\'\\'|\\"\\")\2""")
    places = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        if "sandbox" not in file.parts and doubling.search(file.read_text(encoding="utf-8"))
    ]
    assert places == ["hyper/engine.py", "snowflake/names.py"]
