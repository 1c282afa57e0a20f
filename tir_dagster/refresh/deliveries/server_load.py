"""The delivery `server`: from where on the rows must be read again, or why all of them, and Tableau's own refresh loads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.increment import Increment, Missing, NoIncrement, find_increment, parse_value
from tir_dagster.hyper.package.package import NO_VALUE, Package, read_package
from tir_dagster.refresh.datasource import fetch_shell
from tir_dagster.refresh.deliveries.suffix_load import Load, Log, Suffix, SuffixLoad, own_refreshes, refreshed
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version, settled
from tir_dagster.tableau.refreshes import may_refresh_fully


@dataclass(frozen=True)
class Loaded:
    """What the server shows after its refresh, downloaded; the reason why it had to load everything, if it had to."""

    found: FoundDatasource
    shell: Path
    hyper: Path
    warnings: tuple[str, ...]
    reason: Reason | None = None


def load_by_server(client: TableauClient, load: Load, *, log: Log) -> Loaded:
    """Let the server read what changed, and download the result; the caller compares it with the source."""
    place, found = load.place, load.place.look.found
    if found is None:
        raise DatasourceError(
            f"{place.spec.name}: there is no datasource {place.spec.datasource.name!r} in project {place.look.project.path!r}, "
            "and the delivery `server` needs one that Tableau refreshes. Publish it from Tableau, or use `republish`."
        )
    package = read_package(load.shell)
    increment = needed_increment(place.spec.name, package, load.hyper)
    suffix = _suffix(load, increment)
    if isinstance(suffix, Reason):
        return _load_all(client, load, found, suffix, log)
    if suffix is None:
        log("the server shows these rows already: nothing for it to load")
        return _as_it_is(client, load, settled(client, found))
    loading = SuffixLoad(client, load, package, suffix, found, log)
    outcome = loading.run()
    if isinstance(outcome, Reason):
        return _load_all(client, load, found, outcome, log)
    loaded = _download(client, load, outcome, loading.warnings)
    return replace(loaded, warnings=loaded.warnings + _full_instead(client, package, loaded))


def needed_increment(extract: str, package: Package, hyper: Path) -> Increment | NoIncrement:
    """By what the server goes on; an error where it was never set up to."""
    increment = find_increment(package, hyper)
    if isinstance(increment, NoIncrement) and increment.why is Missing.NOT_INCREMENTAL:
        raise DatasourceError(f"{extract}: {increment.sentence} Or use the delivery `republish`.")
    return increment


def _suffix(load: Load, increment: Increment | NoIncrement) -> Suffix | Reason | None:
    if load.full is not None:
        return _suffix_of_all(load, load.full, increment)
    if isinstance(increment, NoIncrement):
        return Reason.FIRST_LOAD if increment.why is Missing.NEVER_EXTRACTED else Reason.EXTRACT_EMPTIED
    affected = load.affected(increment.column)
    if affected.nulls or load.lag == NO_VALUE:
        return Reason.NULL_INCREMENT
    texts = [text if increment.kind.value == "integer" else f"#{text}#" for text in (affected.smallest,) if text]
    texts += [load.lag] if load.lag else []
    values = [parse_value(text, increment.kind, load.place.spec.name) for text in texts]
    # All of one kind, so they compare.
    return Suffix(increment, min(values)) if values else None


# Here we lost sight of the datasource, not the datasource its rows: it may show most of them.
_UNKNOWN_TO_US = (
    Reason.FIRST_LOAD,
    Reason.STATE_LOST,
    Reason.FOREIGN_PUBLISH,
    Reason.DATASOURCE_CHANGED,
    Reason.DEFINITION_CHANGED,
)


def _suffix_of_all(load: Load, full: Reason, increment: Increment | NoIncrement) -> Suffix | Reason | None:
    if full not in _UNKNOWN_TO_US or isinstance(increment, NoIncrement):
        return full
    first = load.differing(increment.column)
    if first is None or first == NO_VALUE:
        return full if first else None
    return Suffix(increment, parse_value(first, increment.kind, load.place.spec.name))


def _load_all(client: TableauClient, load: Load, found: FoundDatasource, reason: Reason, log: Log) -> Loaded:
    """A full refresh on the server; nobody sees a hole, so it begins at once, whatever schedule the spec names."""
    spec = load.place.spec
    if load.full is None and spec.policy == "incremental_only" and reason is not Reason.FIRST_LOAD:
        raise DatasourceError(
            f"{spec.name}: Tableau would have to load everything, because {reason.value} ({reason.name}), and the policy is "
            "incremental_only. Nothing was touched. Run tir refresh --full, or set policy: auto."
        )
    if not may_refresh_fully(client):
        raise DatasourceError(
            f"{spec.name}: Tableau would have to load everything, because {reason.value} ({reason.name}), and {client.where} lets"
            " nobody start that from outside. Nothing was touched. Allow to run refreshes by hand in the site's settings, or"
            " use the delivery `republish`."
        )
    log(f"a full refresh on the server, because {reason.value}")
    warnings = own_refreshes(client, found)
    patience = load.place.spec.datasource.job_timeout
    now = refreshed(client, found, log, incremental=False, timeout=patience)
    return _download(client, load, now, warnings, reason=reason)


def _full_instead(client: TableauClient, before: Package, loaded: Loaded) -> tuple[str, ...]:
    """Said where the server did not tell what its job was: the rows are right, but they took a full refresh."""
    last = read_package(loaded.shell).events[-1]
    if last.kind != "create" or last.started == before.events[-1].started:
        return ()
    told = (
        f"{client.where} refreshed all of {loaded.found.shown} although only an increment was asked for. Check that the"
        " datasource is set up for incremental refreshes, and that the server knows them."
    )
    return (told,)


def _as_it_is(client: TableauClient, load: Load, found: FoundDatasource) -> Loaded:
    warnings = own_refreshes(client, found)
    if server_version(found) == load.place.look.version:
        return Loaded(found, load.shell, load.hyper, warnings)
    return _download(client, load, found, warnings)


def _download(
    client: TableauClient,
    load: Load,
    found: FoundDatasource,
    warnings: tuple[str, ...],
    *,
    reason: Reason | None = None,
) -> Loaded:
    shell, hyper = fetch_shell(client, found, load.place.folder / "loaded", log=load.place.log)
    return Loaded(found, shell, hyper, warnings, reason)
