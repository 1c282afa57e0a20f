"""Calls of which a Tableau site allows so many an hour: counted in one file per site, for all extracts and processes of a home."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.errors import DatasourceError
from tir_dagster.files import replaced_file
from tir_dagster.refresh.state.lease import LeaseHeldError, LeaseLostError, guarded, lease
from tir_dagster.refresh.state.mirror import look, mirror_of, push
from tir_dagster.tableau.calls import Budget

if TYPE_CHECKING:
    from tir_dagster.tableau.access import TableauAccess

HOUR = 3600.0
# An extract that called within this time will probably call again: the others leave it a call.
_DAY = 86_400.0
FOLDER = "tableau"
# Longer than a lease lives whose holder died.
_LEASE_WAIT_SECONDS = 60.0
_UNCOUNTED = (OSError, LeaseHeldError, LeaseLostError)
log = logging.getLogger(__name__)


class BudgetSpentError(DatasourceError):
    """The calls that the site allows in an hour are used up; nothing was touched. `free_at` is when to try again."""

    def __init__(self, message: str, *, free_at: float) -> None:
        super().__init__(message)
        self.free_at = free_at


@dataclass(frozen=True)
class UsedCalls:
    """The calls of one kind: those of the last hour with their extracts, and when each extract called last."""

    calls: tuple[tuple[float, str], ...] = ()
    last: Mapping[str, float] = field(default_factory=dict)
    # The server itself asked to wait until then: others use the site, too.
    blocked_until: float = 0.0

    def at(self, now: float) -> UsedCalls:
        """Return what still counts; a time in the future, by a clock that was set back, counts as now."""
        calls = tuple((min(moment, now), extract) for moment, extract in self.calls if moment > now - HOUR)
        last = {extract: min(moment, now) for extract, moment in self.last.items() if moment > now - _DAY}
        blocked = self.blocked_until if now < self.blocked_until < now + _DAY else 0.0
        return UsedCalls(calls, last, blocked)

    def with_call(self, extract: str, moment: float) -> UsedCalls:
        return UsedCalls((*self.calls, (moment, extract)), {**self.last, extract: moment}, self.blocked_until)

    def without(self, extract: str, moment: float) -> UsedCalls:
        """Return it without a call that was reserved and not made."""
        calls = list(self.calls)
        with suppress(ValueError):
            calls.remove((moment, extract))
        return UsedCalls(tuple(calls), self.last, self.blocked_until)


def free_at(used: UsedCalls, *, extract: str, number: int, limit: int, now: float) -> float:
    """Return when this extract may make so many calls: `now`, or the moment when enough earlier ones are an hour old.

    An extract that has called within the hour leaves one call to each other extract that called within the day and not
    within the hour, up to half of all: one that changes every minute does not use up what the others need.
    """
    used = used.at(now)
    callers = {caller for _, caller in used.calls}
    waiting = len(used.last.keys() - callers - {extract})
    kept = min(waiting, limit // 2) if extract in callers else 0
    excess = len(used.calls) + min(number, limit) + kept - limit
    if excess <= 0:
        return max(now, used.blocked_until)
    moments = sorted(moment for moment, _ in used.calls)
    return max(moments[min(excess, len(moments)) - 1] + HOUR, used.blocked_until)


class CallBudget:
    """The budgets of one extract's site. A refresh reserves what it needs before it touches anything, and is then finished.

    Calls beyond what was reserved, such as repeated ones, are counted and not refused: a datasource is never left half done.
    """

    def __init__(
        self,
        home: Path,
        access: TableauAccess,
        extract: str,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        name = hashlib.sha256(f"{access.server_url} {access.site}".encode()).hexdigest()[:16]
        self.path = home / FOLDER / f"calls-{name}.json"
        self._limits = access.limits
        self._where = access.where
        self._extract = extract
        self._now = now
        self._reserved: dict[Budget, list[float]] = {}

    def free_at(self, needs: Mapping[Budget, int]) -> tuple[Budget, float] | None:
        """Return which budget is used up and when it is free again; None if the calls may be made now."""
        now, used = self._now(), self._read() if self._counts(needs) else {}
        waits = {kind: self._free_at(used, kind, number, now) for kind, number in self._counts(needs).items()}
        kind = max(waits, key=lambda kind: waits[kind], default=None)
        return None if kind is None or waits[kind] <= now else (kind, waits[kind])

    @contextmanager
    def reserved(self, needs: Mapping[Budget, int]) -> Iterator[None]:
        """Reserve the calls for the block, or raise BudgetSpentError; what it does not make is given back."""
        if not self._counts(needs):
            yield
            return
        with self._changing() as used:
            now = self._now()
            for kind, number in self._counts(needs).items():
                free = self._free_at(used, kind, number, now)
                if free > now:
                    raise self._spent(kind, used[kind].at(now), free)
            for kind, number in self._counts(needs).items():
                self._reserved[kind] = [now] * number
                for _ in range(number):
                    used[kind] = used[kind].at(now).with_call(self._extract, now)
        try:
            yield
        finally:
            self._give_back()

    def count(self, kind: Budget) -> None:
        """Count a call that is about to be sent; one that was reserved is counted already."""
        if kind not in self._limits:
            return
        if self._reserved.get(kind):
            self._reserved[kind].pop()
            return
        # A call that is not counted, because the disk is full or others count for a minute, must not stop a refresh.
        with suppress(*_UNCOUNTED), self._changing() as used:
            now = self._now()
            used[kind] = used[kind].at(now).with_call(self._extract, now)

    def refused(self, kind: Budget, seconds: float) -> None:
        """Note that the server itself asked to wait: other extracts need not ask it again before."""
        if kind not in self._limits:
            return
        with suppress(*_UNCOUNTED), self._changing() as used:
            now = self._now()
            current = used[kind].at(now)
            used[kind] = UsedCalls(current.calls, current.last, now + seconds)

    def _counts(self, needs: Mapping[Budget, int]) -> dict[Budget, int]:
        return {kind: number for kind, number in needs.items() if kind in self._limits}

    def _free_at(self, used: Mapping[Budget, UsedCalls], kind: Budget, number: int, now: float) -> float:
        return free_at(used[kind], extract=self._extract, number=number, limit=self._limits[kind], now=now)

    def _give_back(self) -> None:
        left, self._reserved = self._reserved, {}
        if not any(left.values()):
            return
        with suppress(*_UNCOUNTED), self._changing() as used:
            for kind, moments in left.items():
                for moment in moments:
                    used[kind] = used[kind].without(self._extract, moment)

    def _spent(self, kind: Budget, used: UsedCalls, free: float) -> BudgetSpentError:
        by_extract = Counter(extract for _, extract in used.calls)
        users = ", ".join(f"{extract} {number}" for extract, number in by_extract.most_common(5)) or "none from here"
        why = "the server asked to wait" if used.blocked_until >= free else f"{len(used.calls)} are used ({users})"
        return BudgetSpentError(
            f"{self._extract}: {self._where} allows {self._limits[kind]} {kind.shown} an hour, and {why}: the next is free for this"
            f" extract at {clock_text(free)}. Nothing was touched. Run again then; refresh less often, or choose a delivery that"
            f" needs none of them (docs/tableau-cloud.md). If the site allows more, set {kind.variable}.",
            free_at=free,
        )

    def _read(self) -> dict[Budget, UsedCalls]:
        look(self.path)
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
            return {kind: _used_from(value.get(kind.value, {})) for kind in Budget}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, AttributeError, LookupError):
            log.warning("%s cannot be read: the calls of the last hour are not known", self.path)
        return {kind: UsedCalls() for kind in Budget}

    @contextmanager
    def _changing(self) -> Iterator[dict[Budget, UsedCalls]]:
        """Read the counts and write them back, as one step among all processes; nothing is written if the block raises."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Where the state is shared, the counts have a lease of their own: those of a dead process are free after its end.
        shared = mirror_of(self.path) is not None
        leased = lease(self.path.with_name("lease.json"), purpose="counting calls", wait_seconds=_LEASE_WAIT_SECONDS)
        with leased if shared else nullcontext(), guarded(self.path):
            used = self._read()
            yield used
            with replaced_file(self.path) as beside:
                beside.write_text(json.dumps({kind.value: _to_json(calls) for kind, calls in used.items()}), "utf-8")
            push(self.path)


def clock_text(moment: float) -> str:
    """Return the moment as messages show it, rounded up to the minute."""
    return f"{datetime.fromtimestamp(-(-moment // 60) * 60, UTC):%H:%M} UTC"


def _used_from(value: Any) -> UsedCalls:
    calls = tuple((float(moment), str(extract)) for moment, extract in value.get("calls", ()))
    last = {str(extract): float(moment) for extract, moment in value.get("last", {}).items()}
    return UsedCalls(calls, last, float(value.get("blocked_until", 0.0)))


def _to_json(used: UsedCalls) -> dict[str, Any]:
    return {"calls": used.calls, "last": used.last, "blocked_until": used.blocked_until}
