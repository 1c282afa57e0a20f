"""Publishing of whole packages over exactly what was looked at, keeping a datasource's settings; and putting a package back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tir_dagster.crash_points import crash_after
from tir_dagster.files import VirtualFile
from tir_dagster.hyper.package.package import RefreshChange, greatest_increment, packed, read_package, refresh_change
from tir_dagster.measuring import moved
from tir_dagster.refresh.confirm import confirmation_of, intend
from tir_dagster.refresh.context import Looked, Published, RefreshContext, ServerLook, publishing
from tir_dagster.refresh.datasource import credentials_for, named_credentials
from tir_dagster.refresh.deliveries.relationships import related_file
from tir_dagster.refresh.deliveries.settings import (
    is_remembered,
    put_back_remembered,
    remember,
    remembered_connections,
)
from tir_dagster.refresh.server_content import check_delivered
from tir_dagster.refresh.state.records import Intent
from tir_dagster.refresh.state.versions import Version
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    FoundDatasource,
    reread,
    server_version,
    settled,
)
from tir_dagster.tableau.failures import RefusedError, UnknownOutcomeError
from tir_dagster.tableau.jobs import (
    JobCancelledError,
    JobFailedError,
    JobVanishedError,
    outlast_publishes,
    wait_for_job,
)
from tir_dagster.tableau.outcome import ForeignPublishError, check_undisturbed
from tir_dagster.tableau.publishing import ByJob, Check, always, publish
from tir_dagster.tableau.settings import ConnectionCredential, Restored, list_attachments, nothing
from tir_dagster.tableau.transfer import tell_progress

Log = Callable[[str], None]


@dataclass(frozen=True)
class Delivered:
    """The datasource after a publish, warnings about lost settings, and whether its rows must be compared to be sure."""

    datasource: FoundDatasource
    warnings: tuple[str, ...]
    doubtful: bool = False


def deliver(
    client: TableauClient,
    spec: ExtractSpec,
    look: ServerLook,
    *,
    hyper: Path,
    shell: Path | None,
    rows: int,
    credentials: Sequence[ConnectionCredential],
    home: Path,
    log: Log,
    check: Check = always,
    by_job: ByJob | None = None,
) -> Delivered:
    """Publish over exactly what was looked at, and put back the settings that overwriting loses; warn about the rest.

    The settings are saved in `home`.
    """
    servers: tuple[str, ...] = ()
    if shell is None:
        file = VirtualFile.of(hyper, name=f"{spec.name}.hyper")
    else:
        package = read_package(shell)
        servers = package.servers
        file = packed(package, f"{spec.name}.tdsx", hyper=hyper, refresh=refresh_change(package, hyper, rows=rows))
    seen = (
        remember(look.datasource, home, list_attachments(client, look.datasource))
        if look.datasource is not None
        else nothing
    )
    crash_after("packed")
    log(f"publishing {file.size / 1e6:,.1f} MB")
    inferred = False

    def infer() -> None:
        nonlocal inferred
        inferred = True

    published = publish(
        client,
        file,
        project=look.project,
        name=spec.datasource.name,
        overwrite=look.datasource is not None,
        expected=look.version,
        connections=credentials,
        servers=servers,
        progress=tell_progress(log, "uploading", clock=client.retry.clock),
        check=check,
        seen=seen,
        inferred=infer,
        by_job=by_job,
    )
    crash_after("landed")
    restored = put_back_remembered(client, published, home, credentials)
    if restored.datasource is published and published.revision is not None:
        # Nothing was put back, so this reading shows our publish and nothing later. Waiting would show no more: a refresh by
        # somebody else in the second of our publish has the same time, and any later change shows in the next look.
        return Delivered(published, restored.warnings, inferred)
    now = _settled(client, published, restored)
    # Without revisions it is unknown whether somebody published since.
    doubtful = inferred or now.revision is None or server_version(now) != server_version(restored.datasource)
    return Delivered(now, restored.warnings, doubtful)


def _settled(client: TableauClient, published: FoundDatasource, restored: Restored) -> FoundDatasource:
    """Return the datasource at a moment that can be confirmed; raise if somebody published after us."""
    now = settled(client, restored.datasource, earlier=published)
    check_undisturbed(published, now, where=client.where, meanwhile="our publish was being confirmed")
    return now


def finish_delivery(
    client: TableauClient,
    spec: ExtractSpec,
    look: ServerLook,
    *,
    home: Path,
    env: Mapping[str, str],
    foreign: bool,
    landed: bool,
) -> tuple[ServerLook, tuple[str, ...]]:
    """Put back the settings that our earlier publish removed, if that run ended before it could do so.

    `foreign` and `landed` describe whose rows these are: what somebody else published is not changed.
    """
    if look.datasource is None or not is_remembered(home):
        return look, ()
    credentials = named_credentials(spec, remembered_connections(home), env)
    # The look may have taken long, and putting back changes the version: only what was looked at may be confirmed.
    _check_same(client, look.datasource, reread(client, look.datasource))
    restored = put_back_remembered(client, look.datasource, home, credentials, foreign=foreign, landed=landed)
    now = _settled(client, look.datasource, restored)
    _check_same(client, restored.datasource, now)
    return replace(look, datasource=now), restored.warnings


def _check_same(client: TableauClient, before: FoundDatasource, now: FoundDatasource | None) -> None:
    if now is None or server_version(now) != server_version(before):
        state = f"it is now {server_version(now)}" if now is not None else "it is gone"
        raise ForeignPublishError(
            f"Somebody else changed {before.shown} on {client.where} while it was being looked at (it was"
            f" {server_version(before)}, {state}). Nothing is confirmed. Run again: the next refresh compares what is there."
        )


@dataclass(frozen=True)
class PublishTarget:
    """The datasource as it was looked at, and all that publishing over it needs."""

    spec: ExtractSpec
    look: ServerLook
    credentials: Sequence[ConnectionCredential]
    # For the files to send, and for the saved settings.
    folder: Path
    home: Path
    # Called right before every request that publishes.
    check: Check = always
    log: Callable[[str], None] = lambda _: None
    by_job: ByJob | None = None


def put_back(
    client: TableauClient, place: PublishTarget, datasource: FoundDatasource, *, shell: Path, hyper: Path
) -> Restored:
    """Publish the kept package over our own publish, if the datasource is still this one."""
    package = read_package(shell)
    value = greatest_increment(package, hyper)
    # Another value if the server showed later rows than ours: it must continue from the rows that are put back.
    refresh = None if value == package.last_increment else RefreshChange(increment_value=value)
    file = packed(package, f"{place.spec.name}.tdsx", hyper=hyper, refresh=refresh)
    return publish_over(client, file, place, datasource, servers=package.servers)


def publish_over(
    client: TableauClient,
    package: VirtualFile,
    place: PublishTarget,
    datasource: FoundDatasource,
    *,
    servers: Collection[str],
) -> Restored:
    """Publish over exactly this datasource, and put its settings back: those saved earlier in this run, else those of now.

    `servers` are the addresses that the package reads from.
    """
    beside = None if is_remembered(place.home) else list_attachments(client, datasource)
    seen = remember(datasource, place.home, beside)
    published = publish(
        client,
        package,
        project=place.look.project,
        name=place.spec.datasource.name,
        overwrite=True,
        expected=server_version(datasource),
        connections=place.credentials,
        servers=servers,
        progress=tell_progress(place.log, "uploading", clock=client.retry.clock),
        check=place.check,
        seen=seen,
        by_job=place.by_job,
    )
    crash_after("landed")
    restored = put_back_remembered(client, published, place.home, place.credentials)
    check_undisturbed(published, restored.datasource, where=client.where, meanwhile="its settings were being put back")
    return restored


def large_by_job(context: RefreshContext, version: str) -> ByJob:
    """Publish large packages by a job, which is recorded in the intent about this version: the next run waits for it."""

    def asked() -> None:
        context.check_lease()
        context.change_sets.note_asked_job(version)

    def taken(job_id: str) -> None:
        context.check_lease()
        context.change_sets.note_job(version, job_id)
        context.log(f"the server publishes by job {job_id}")
        crash_after("sent")

    datasource = context.spec.datasource
    return ByJob(int(datasource.publish_job_mb * 1_000_000), datasource.job_timeout, taken, asked)


def outlast(context: RefreshContext, client: TableauClient, intent: Intent) -> datetime | None:
    """Wait until the job of an interrupted run has ended, however: otherwise it could change what is published later.

    Return when it ended, by the server's clock, if it ended well and the server tells.
    """
    what, datasource = "change of data" if intent.patch else "publish", context.spec.datasource
    if intent.job is None:
        if intent.by_job:
            _outlast_unnamed(context, client)
        return None
    context.log(f"waiting for the {what} that was sent before")
    try:
        return wait_for_job(client, intent.job, what=what, timeout=datasource.job_timeout).ended_at
    except (JobFailedError, JobCancelledError, JobVanishedError) as error:
        context.log(f"it is over: {error}")
        return None
    except RefusedError as error:
        raise UnknownOutcomeError(f"{error} The server may still apply a {what} that was sent before.") from error


def _outlast_unnamed(context: RefreshContext, client: TableauClient) -> None:
    """Wait for the job of a run that ended before it knew which job the server made of its publish."""
    datasource = context.spec.datasource
    context.log("a publish was sent before, and nobody knows its job: waiting for all jobs that may be it")
    what = "which may be our interrupted publish"
    if not outlast_publishes(client, datasource.name, what=what, timeout=datasource.job_timeout):
        context.log(
            "this user may not see the jobs: if the server still works on that publish, it shows later, and the next refresh"
            " then compares the rows"
        )


def publish_whole(
    context: RefreshContext,
    looked: Looked,
    version: Version,
    *,
    file: AbstractContextManager[Path],
    keyed: bool = False,
) -> Published:
    """Publish the version as this Hyper file, intent before and confirmation after; `keyed`: it has a key column of ours."""
    intend(context, looked, version, keyed=keyed)
    crash_after("intended")
    shell = version.shell
    with publishing(context) as client, related_file(context, version, file) as hyper:
        sent_bytes = hyper.stat().st_size
        moved(rows=version.manifest["rows"], bytes=sent_bytes)
        delivered = deliver(
            client,
            context.spec,
            looked.server,
            hyper=hyper,
            shell=shell if shell.is_file() else None,
            rows=version.manifest["rows"],
            credentials=credentials_for(context.spec, looked.server.datasource, context.env),
            home=context.folder,
            log=context.log,
            check=context.check_lease,
            by_job=large_by_job(context, version.id),
        )
        warnings = delivered.warnings
        if delivered.doubtful:
            warnings += check_delivered(context, client, delivered.datasource, version)
    crash_after("published")
    server = ServerLook(looked.server.project, delivered.datasource)
    confirmation = confirmation_of(context, version, server, before=looked.confirmed, keyed=keyed)
    return Published(confirmation, delivered.datasource, warnings, sent_bytes=sent_bytes)
