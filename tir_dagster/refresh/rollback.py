"""Go back to an earlier version: it is published again as a new version, guarded and confirmed like any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.crash_points import crash_after
from tir_dagster.errors import DatasourceError, ExtractError, TirError
from tir_dagster.files import copy_file, need_space
from tir_dagster.hyper.hyperfile import describe_all
from tir_dagster.hyper.package.package import read_package
from tir_dagster.refresh.context import (
    NEEDED_CALLS,
    Looked,
    Published,
    RefreshContext,
    explaining_lost_lease,
    shapes_of,
)
from tir_dagster.refresh.datasource import look_at_server, server_package
from tir_dagster.refresh.deliveries.patch import Patch
from tir_dagster.refresh.deliveries.relationships import check_restored
from tir_dagster.refresh.deliveries.republish import Republish
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.hold import Hold
from tir_dagster.refresh.state.records import ROLLBACK
from tir_dagster.refresh.state.versions import SHELL, Version, new_version
from tir_dagster.spec.extract import ExtractSpec


@contextmanager
def held(context: RefreshContext, *, by: str, reason: str) -> Iterator[None]:
    """Put the extract on hold, if there is a reason, and publish in the block; if nothing was published, the hold is taken back."""
    before = context.hold.read()
    if reason:
        context.hold.put(Hold(f"{context.now():%Y-%m-%d %H:%M} UTC", by, reason))
        crash_after("held")
    try:
        yield
    except BaseException:
        if reason and _is_untouched(context):
            if before is None:
                context.hold.release()
            else:
                context.hold.put(before)
        elif reason:
            context.log(
                f"the extract is on hold: see tir history {context.spec.name}, then tir release {context.spec.name}"
            )
        raise


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback would publish, and instead of what."""

    target: Version
    instead_of: str
    rows_now: int

    @property
    def sentence(self) -> str:
        rows = self.target.manifest["rows"]
        return (
            f"version {self.target.id} with {rows:,} rows, the source at {self.target.manifest['source_version']}, "
            f"instead of version {self.instead_of} with {self.rows_now:,} rows"
        )


def _is_untouched(context: RefreshContext) -> bool:
    """Whether the server surely holds what it held before the publish."""
    intent = context.change_sets.intent()
    if intent is None:
        return True
    try:
        with context.client() as client:
            return not intent.by_job and look_at_server(client, context.spec).version_text == intent.base_server_version
    except TirError:
        return False


def refuse_trigger(spec: ExtractSpec) -> None:
    """Raise for an extract that has no versions here."""
    if spec.delivery == "trigger":
        raise ExtractError(
            f"{spec.name}: Tableau itself refreshes this extract (delivery `trigger`), so no versions are kept here. Restore a revision "
            "in Tableau; `tir revisions` lists and fetches them."
        )


def plan_rollback(context: RefreshContext, looked: Looked, version_id: str) -> RollbackPlan:
    """Find the version to go back to; raise if there is none, if it is the published one, or if somebody else published since."""
    name, confirmed = context.spec.name, looked.confirmed
    refuse_trigger(context.spec)
    if confirmed is None:
        raise ExtractError(f"{name}: nothing was published yet, so there is nothing to go back from.")
    if looked.foreign or looked.server.datasource is None:
        raise DatasourceError(
            f"{name}: somebody else published or removed the datasource since version {confirmed.version}. Nothing was touched. "
            f"See tir revisions {name}; the next refresh starts from what is there."
        )
    known = {version.id: version for version in context.versions.versions()}
    if version_id not in known:
        kept = ", ".join(other for other in known if other != confirmed.version) or "none"
        raise ExtractError(
            f"{name}: version {version_id} is not kept here. Kept besides the published one: {kept}. `keep.versions` in the spec says "
            f"how many stay; tir revisions {name} lists the server's own revisions."
        )
    if set(known[version_id].tables) != set(context.spec.parts):
        raise ExtractError(
            f"{name}: the spec declares other tables than version {version_id} has. Nothing was touched. Go back to the spec of then and run"
            f" tir refresh {name}, or fetch what was there with tir revisions {name} --fetch {version_id}."
        )
    if known[version_id].manifest["fingerprint"] == confirmed.fingerprint:
        raise ExtractError(f"{name}: the datasource shows the rows of version {version_id} already. Nothing to do.")
    return RollbackPlan(known[version_id], confirmed.version, confirmed.rows)


def make_version(context: RefreshContext, looked: Looked, plan: RollbackPlan) -> Version:
    """Copy the old version to a new one: numbers only grow, so everything that asks for the newest version stays right.

    Only rows go back: the package that people have around them now stays.
    """
    target, confirmed = plan.target, looked.confirmed
    assert confirmed is not None, "planned"
    context.check_lease()
    need_space(context.folder, target.extract.stat().st_size)
    with explaining_lost_lease(context), new_version(context.versions) as workspace:
        shell, _ = server_package(context, looked)
        if shell is not None and not _fits(shell, target):
            raise ExtractError(
                f"{context.spec.name}: the datasource has other columns now than at version {target.id}, so its package does not fit these"
                f" rows. Fetch what was there with tir revisions {context.spec.name} --fetch {target.id}, or run a full refresh."
            )
        copy_file(target.extract, workspace.extract)
        if context.spec.tables:
            check_restored(context.spec, workspace.extract, shapes_of(target), declared=shell is None)
        if shell is not None:
            copy_file(shell, workspace.folder / SHELL)
        change_set = f"{ROLLBACK}{new_id()}"
        manifest = {
            # The publish writes another package around the rows than the one that the server had made.
            **{name: value for name, value in target.manifest.items() if name != "from_server"},
            "change_set": change_set,
            "change_sets": [change_set],
            "base": confirmed.version,
            "replaced_in": None,
            "server_version": looked.server.version_text,
            "rows_purged": confirmed.rows,
            "rows_appended": target.manifest["rows"],
            "compared": {},
            "rolled_back_to": target.id,
            "decision": "rollback",
            "sentence": None,
            "keys": None,
            "seconds": {},
            "instead_of": confirmed.version,
            "tables": {
                table: {
                    **part,
                    "compared": {},
                    "keys": None,
                    "rows_purged": confirmed.of(table).rows,
                    "rows_appended": part["rows"],
                }
                for table, part in (target.manifest.get("tables") or {}).items()
                if table in confirmed.parts
            },
        }
        version = context.versions.commit(workspace, manifest, after=confirmed.version)
    crash_after("restored")
    return version


def _fits(shell: Path, target: Version) -> bool:
    """Whether the package finds all its columns in the version's file."""
    package = read_package(shell)
    names = package.hyper_names or {record.remote_name: record.remote_name for record in package.columns}
    return set(names.values()) <= {column.name for table in describe_all(target.extract) for column in table.columns}


def publish_again(context: RefreshContext, looked: Looked, version: Version) -> Published:
    """Publish all rows of the version over exactly what was looked at, whatever the delivery."""
    with explaining_lost_lease(context), context.calls.reserved(NEEDED_CALLS["republish"]):
        if context.spec.delivery == "patch":
            published = Patch(context).publish_whole(looked, version)
        else:
            published = Republish(context).publish(looked, version)
    context.check_lease()
    return published
