"""The stage `look`: find out what the server holds and what a crash left, and repair it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from tir_dagster.changes.plan import Reason
from tir_dagster.crash_points import crash_after
from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.refresh.confirm import confirmation_of, settle_change_sets
from tir_dagster.refresh.context import Looked, RefreshContext, ServerLook, explaining_lost_lease
from tir_dagster.refresh.datasource import credentials_for, look_at_server
from tir_dagster.refresh.deliveries import RecoveredPublish
from tir_dagster.refresh.deliveries.patch import Patch, check_patchable
from tir_dagster.refresh.deliveries.server import Server
from tir_dagster.refresh.deliveries.whole import finish_delivery, outlast
from tir_dagster.refresh.server_content import changes_known_until, compare_content, outcome_by_content
from tir_dagster.refresh.state.change_sets import DamagedStateError
from tir_dagster.refresh.state.notes import Compared, read_compared, write_compared
from tir_dagster.refresh.state.records import Confirmation, Intent, surely_other_rows
from tir_dagster.refresh.state.versions import Version
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import ServerVersion, name_of_id, none_of_that_name, settled, shown_place
from tir_dagster.tableau.jobs import changes_since, check_jobs_are_shown
from tir_dagster.tableau.outcome import ForeignPublishError, PublishOutcome
from tir_dagster.tableau.transfer import NoExtractError

_MOST_LOOKS = 3


@dataclass(frozen=True)
class _Judged:
    """The outcome of the last publish, and what the server holds after a repair."""

    verdict: PublishOutcome
    server: ServerLook
    # None if the rows were not compared.
    compared: Compared | None = None
    # Why the datasource that the spec names is not the confirmed one.
    datasource_reason: Reason | None = None
    # The version that the server holds although no record says so.
    forgotten: Version | None = None
    # When the job of the last publish ended, by the server's clock, if that is known.
    ended_at: datetime | None = None

    @property
    def keyed(self) -> bool:
        return self.compared is None or self.compared.keyed

    @property
    def alike(self) -> bool:
        return self.compared is None or self.compared.alike

    @property
    def bare(self) -> bool:
        return self.compared is not None and self.compared.bare


def look(context: RefreshContext, confirmed: Confirmation | None, *, repair: bool = True) -> Looked:
    """Find out what the server holds and what a crash left; confirm a publish that landed unnoticed.

    Without the lease nothing may be repaired: what looks like a crash can be another run that still works.
    """
    with explaining_lost_lease(context), context.stages.timed("look"), context.client() as client:
        if context.spec.delivery != "republish":
            check_jobs_are_shown(client)
        looked = _Looking(context, client, repair=repair).look(confirmed)
    crash_after("looked")
    if looked.server.datasource is None:
        # Perhaps a name was misspelt: say it before anything is created.
        place = f"datasource {context.spec.datasource.name!r} in project {looked.server.project.path!r}"
        context.log(f"there is no {place} yet: a refresh creates it")
    return looked


class _Looking:
    """One look at the server, signed in."""

    def __init__(self, context: RefreshContext, client: TableauClient, *, repair: bool) -> None:
        self._context = context
        self._client = client
        self._repair = repair
        self._warnings: tuple[str, ...] = ()

    def look(self, confirmed: Confirmation | None) -> Looked:
        """Look, repair, and confirm a publish that landed unnoticed."""
        intent = self._intent(confirmed)
        judged = self._judge(intent, confirmed)
        server, verdict = judged.server, judged.verdict
        # The publish may have had the same rows as before, or may have been put back since.
        differs = intent is not None and (
            confirmed is None or surely_other_rows(intent.fingerprint, confirmed.fingerprint)
        )
        untouched = verdict is PublishOutcome.NOT_LANDED and differs and intent is not None and intent.hole is None
        if self._repair:
            # The comparison may have taken long: the intent on disk may belong to a process that took over.
            self._context.check_lease()
            server = self._put_back_around(server, foreign=verdict is PublishOutcome.FOREIGN, landed=not untouched)
        late = None
        jobs_until = judged.ended_at or (changes_known_until(confirmed) if confirmed is not None else None)
        about = partial(confirmation_of, self._context, server=server, before=confirmed, jobs_until=jobs_until)
        if verdict is PublishOutcome.LANDED and intent is not None and server.datasource is not None:
            version = self._context.versions.get(intent.version)
            late = about(version=version, keyed=intent.keyed and judged.keyed)
        if judged.forgotten is not None:
            late = about(version=judged.forgotten, keyed=judged.keyed)
        in_doubt = verdict is PublishOutcome.PARTIAL or self._is_unknown(intent, confirmed, judged)
        if self._repair and intent is not None and late is None and not in_doubt:
            self._context.change_sets.drop_intent()
        known = late or (replace(confirmed, keyed=confirmed.keyed and judged.keyed) if confirmed else None)
        base = self._context.known_version(known.version) if known else None
        return Looked(
            server,
            known,
            base,
            foreign=verdict is PublishOutcome.FOREIGN,
            datasource_reason=judged.datasource_reason,
            late=late,
            in_doubt=in_doubt,
            alike=judged.alike,
            bare=judged.bare,
            warnings=self._warnings,
        )

    def _is_unknown(self, intent: Intent | None, confirmed: Confirmation | None, judged: _Judged) -> bool:
        """Whether an interrupted publish of all rows was to replace unconfirmed content, and did not.

        That content may hold a part of a change, or the same rows in another user's file: only the intent shows it.
        """
        if intent is None or intent.patch or confirmed is None or self._context.spec.delivery != "patch":
            return False
        untouched = judged.server.version_text == intent.base_server_version
        return untouched and intent.base_server_version != confirmed.server_version

    def _intent(self, confirmed: Confirmation | None) -> Intent | None:
        """Return the intent, unless its version is confirmed already: then only the cleaning up was interrupted."""
        try:
            intent = self._context.change_sets.intent()
        except DamagedStateError:
            self._context.log("the record of the interrupted publish cannot be read: only what the server holds counts")
            if self._repair:
                self._context.change_sets.drop_intent()
            return None
        if intent is None or confirmed is None or not _is_confirmed(intent, confirmed):
            return intent
        if self._repair:
            settle_change_sets(self._context, confirmed)
        return None

    def _judge(self, intent: Intent | None, confirmed: Confirmation | None) -> _Judged:
        spec, client = self._context.spec, self._client
        if self._repair and intent is not None and not intent.patch:
            # Until it has ended, what the server shows decides nothing. The delivery `patch` joins its job instead.
            outlast(self._context, client, intent)
        server = look_at_server(client, spec)
        datasource_reason = self._datasource_reason(server, confirmed)
        credentials_for(spec, server.datasource, self._context.env, rest_version=client.rest_version)
        if spec.delivery == "patch":
            check_patchable(client, spec.name, server.datasource)
        if datasource_reason is not None:
            self._context.log(f"{datasource_reason.value}: everything is loaded")
            return self._repaired(
                _Judged(PublishOutcome.FOREIGN, server, datasource_reason=datasource_reason), intent, confirmed
            )
        judged = self._aftermath(server, intent, confirmed)
        if not self._repair or intent is None:
            return judged
        for _ in range(_MOST_LOOKS - 1):
            try:
                return self._repaired(judged, intent, confirmed)
            except ForeignPublishError:
                # A job ended between the look and the request, or somebody edited a description: look again.
                judged = self._aftermath(look_at_server(client, spec), intent, confirmed)
        return self._repaired(judged, intent, confirmed)

    def _datasource_reason(self, server: ServerLook, confirmed: Confirmation | None) -> Reason | None:
        """Return why the datasource is not the confirmed one; raise if a misspelt name would create a new one."""
        spec, client = self._context.spec, self._client
        if confirmed is None or (server.datasource is not None and server.datasource.id == confirmed.datasource_id):
            return None
        named = shown_place(spec.datasource.name, server.project.path, client.where)
        before = name_of_id(client, confirmed.datasource_id) or confirmed.datasource or named
        if before == named:
            # A new datasource under the same name is somebody else's.
            return None if server.datasource is not None else Reason.DATASOURCE_GONE
        if server.datasource is None and not spec.datasource.create:
            raise DatasourceError(
                f"{spec.name}: {Reason.DATASOURCE_CHANGED.value} than before: it was published to {before}. "
                f"{none_of_that_name(client, project=server.project, name=spec.datasource.name)} Nothing was touched. Correct the name in"
                " the spec; or, if a new datasource is meant to be created by a full refresh, set datasource.create: true."
            )
        return Reason.DATASOURCE_CHANGED

    def _repaired(self, judged: _Judged, intent: Intent | None, confirmed: Confirmation | None) -> _Judged:
        """Complete what an interrupted run left; return the outcome."""
        client = self._client
        if intent is None or not self._repair:
            return judged
        # By the intent, not by the spec: the delivery may have been changed since.
        delivery = Patch(self._context) if intent.patch else Server(self._context)
        last = RecoveredPublish(judged.verdict, judged.server)
        recovered = delivery.recover(client, last, intent, confirmed)
        if recovered == last:
            return judged
        compared = judged.compared if intent.patch else None
        return replace(
            judged,
            verdict=recovered.outcome,
            server=recovered.server,
            compared=compared,
            ended_at=recovered.ended_at,
        )

    def _put_back_around(self, server: ServerLook, *, foreign: bool, landed: bool) -> ServerLook:
        """Put back settings that our publish removed, such as tags; do not change what somebody else published."""
        context = self._context
        server, warnings = finish_delivery(
            self._client, context.spec, server, home=context.folder, env=context.env, foreign=foreign, landed=landed
        )
        self._warnings += warnings
        return server

    def _with_jobs(self, server: ServerLook, confirmed: Confirmation) -> ServerLook:
        """Notice a refresh or a change of data by somebody else that the server does not show in the version."""
        since = changes_known_until(confirmed)
        if server.datasource is None or since is None or server.version_text != confirmed.server_version:
            return server
        jobs = changes_since(self._client, server.datasource, since)
        return replace(server, after_job=jobs[0]) if jobs else server

    def _aftermath(self, server: ServerLook, intent: Intent | None, confirmed: Confirmation | None) -> _Judged:
        if intent is None and confirmed is not None:
            server = self._with_jobs(server, confirmed)
        before = intent.base_server_version if intent else (confirmed.server_version if confirmed else None)
        compared = None
        if (intent or confirmed) and server.datasource is not None and server.version_text != before:
            version = self._context.known_version(intent.version if intent else confirmed.version if confirmed else "")
            if version is not None:
                server, compared = self._compared(server, version, intent, confirmed)
        verdict = outcome_by_content(
            intent=intent,
            confirmed=confirmed,
            server_version=server.version_text,
            server_fingerprints=compared.fingerprints if compared else (),
            heals=compared is not None and compared.heals,
        )
        if verdict is PublishOutcome.FOREIGN or (confirmed is None and intent is None):
            for version in self._unrecorded(confirmed) if server.datasource is not None else ():
                server, comparison = self._compared(server, version, None, confirmed)
                if version.manifest["fingerprint"] in comparison.fingerprints:
                    self._context.log(PublishOutcome.FORGOTTEN.value)
                    return _Judged(PublishOutcome.FORGOTTEN, server, comparison, forgotten=version)
        if verdict is not PublishOutcome.CLEAN:
            self._context.log(verdict.value)
        return _Judged(verdict, server, compared)

    def _unrecorded(self, confirmed: Confirmation | None) -> list[Version]:
        """Return the versions confirmed after the last one on record: somebody deleted the run with the record."""
        after = confirmed.version if confirmed is not None else ""
        return [version for version in self._context.settled_versions() if version.id > after]

    def _is_published(self, server: ServerLook, confirmed: Confirmation | None) -> bool:
        """Whether the content was published, not refreshed by Tableau, which may write equal values differently."""
        if self._context.spec.delivery != "republish" or confirmed is None or server.datasource is None:
            return self._context.spec.delivery == "patch"
        with suppress(ValueError):
            return ServerVersion.parse(confirmed.server_version).revision != server.datasource.revision
        return False

    def _compared(
        self, server: ServerLook, version: Version, intent: Intent | None, confirmed: Confirmation | None
    ) -> tuple[ServerLook, Compared]:
        """Compare the server's content with the version, once: an edited description changes the server's version, too."""
        assert server.datasource is not None
        exactly = self._is_published(server, confirmed) if intent is None else intent.patch
        folder, of = self._context.folder, (version.id, str(exactly))
        if intent is None and (known := read_compared(folder, (server.version_text, *of))) is not None:
            return server, known
        self._context.log("the server holds another version than the last confirmed one: comparing its rows")
        if intent is not None:
            return server, self._compare(server, version, intent, exactly=exactly)
        server = replace(server, datasource=settled(self._client, server.datasource))
        compared = self._compare(server, version, intent, exactly=exactly)
        if self._repair:
            write_compared(folder, (server.version_text, *of), compared)
        return server, compared

    def _compare(self, server: ServerLook, version: Version, intent: Intent | None, *, exactly: bool) -> Compared:
        assert server.datasource is not None
        folder = self._context.work / "look"
        try:
            return compare_content(
                self._context, self._client, server.datasource, version, folder, intent, exactly=exactly
            )
        except MachineError:
            # Nobody has looked: it may well be ours.
            raise
        except (ExtractError, NoExtractError) as error:
            # Not even the columns fit: whatever it is, it is not ours.
            self._context.log(f"the server's extract cannot be compared: {error}")
            return Compared()


def _is_confirmed(intent: Intent, confirmed: Confirmation) -> bool:
    """Whether the publish is on record: as its own version, or as the later one that has the package of the server."""
    return intent.version == confirmed.version or (
        intent.version < confirmed.version and intent.change_set in confirmed.change_sets
    )
