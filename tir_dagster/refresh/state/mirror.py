"""State that several workers share: a folder of this machine becomes the copy of what an object store holds.

Below the store's address, each extract has one small object, `state.json`: the holder of the lease, the small files themselves,
and the list of the large ones. It is only replaced by conditional writes, so taking the lease, renewing it and every commit
are one step each, and a worker that lost its lease cannot write any more. Large files are uploaded before, under names of
their own that are never used again, and removed after.

A home that is not mounted on a store is just a folder: then every function here returns at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tir_dagster.changes.change_set import TABLES
from tir_dagster.errors import TirError
from tir_dagster.files import need_space, private_folder, replaced_file
from tir_dagster.refresh.state.objects import (
    ConflictError,
    ObjectStore,
    S3Store,
    StateStoreError,
    checked_address,
)
from tir_dagster.retries import looks

# Folders of a home that are shared, and how many names lead to what has a state of its own.
_UNITS = {"extracts": 2, "loads": 2, "alerts": 1, "tableau": 1}
# Scratch files and running commands: of this machine alone.
_OWN = frozenset({"work", "downloads", "plan", "commands", "lock"})
_STATE, _FILES, _HISTORY, _LOCK = "state.json", "files/", "history", ".copy.lock"
# The folders of a change set or a version: whole or not there, and told apart by their manifests.
_WHOLE = ("change_sets", "versions")
# A version whose file may become the next one: of this machine alone, and it stays.
_SPARE = ".spare."
# A reader need not ask the store more often.
_FRESH_SECONDS = 1.0
# A lease that was renewed so short a time ago is ours; it expires much later.
_RENEWED_SECONDS = 1.0
# Whoever keeps others from the folder for so long is suspended.
_LOCK_SECONDS = 30.0
_AT_ONCE = 8
_MOST_CONFLICTS = 50


class LeaseLostError(TirError):
    """This process did not renew its lease in time, and somebody else has taken it."""


class _HeldError(Exception):
    def __init__(self, holder: Mapping[str, Any]) -> None:
        super().__init__()
        self.holder = holder


@dataclass(frozen=True)
class _State:
    """The content of `state.json`."""

    holder: Mapping[str, Any] | None = None
    # Whether it replaces what workers have on their disks: not before what the first one has is here.
    ready: bool = False
    # Somebody died, or could not clean up: there may be files that nothing refers to.
    unclean: bool = False
    # By path: the text of small files, and the name and size of large ones.
    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # The file with the list of the history's files, which grows, and which few need.
    history: str | None = None
    # Of each write its own: by it a writer whose answer was lost knows its own write again.
    write: str = ""
    # How old the holder's last sign of life was when somebody else wrote last: such a write does not renew the lease.
    idle: float = 0.0


@dataclass(frozen=True)
class _Read:
    """The state as it was read or written: with its tag and its age by the store's clock."""

    state: _State
    etag: str | None
    age: float

    @property
    def silence(self) -> float:
        """For how many seconds the holder has not written."""
        return self.age + self.state.idle


class Mirror:
    """The shared state of one extract, one load, the alerts or the counted calls; used by all threads of this process."""

    def __init__(self, store: ObjectStore, unit: str, folder: Path) -> None:
        self.folder = folder
        self._store = store
        self._unit = unit
        self._lock = threading.RLock()
        self._me: str | None = None
        self._read: _Read | None = None
        self._history: tuple[str | None, dict[str, Sequence[Any]]] = (None, {})
        self._looked_at = self._renewed_at = float("-inf")
        self._unclean = False
        self._folder_lock: TextIO | None = None

    @property
    def shown(self) -> str:
        return f"{self._store.address}/{self._unit}"

    # The lease

    def take(
        self, me: Mapping[str, Any], is_alive: Callable[[Mapping[str, Any], float], bool]
    ) -> Mapping[str, Any] | None:
        """Take the lease; return the holder if there is one who is alive."""

        def taken(read: _Read) -> _State:
            holder = read.state.holder
            if holder is not None and is_alive(holder, read.silence):
                raise _HeldError(holder)
            return replace(read.state, holder=dict(me), unclean=read.state.unclean or holder is not None)

        with self._lock:
            self._read = None
            try:
                self._change(taken)
            except _HeldError as held:
                return held.holder
            self._me, self._unclean = me["id"], False
        return None

    def begin(self) -> None:
        """Make the folder the copy of the store, under the lease; what is here when the store is first used goes there."""
        self._lock_folder(_LOCK_SECONDS)
        self._remove_unfinished()
        state = self._current().state
        if state.ready:
            self._copy_down(state)
        else:
            self._check_conditions()
            here = [path for path in sorted(self.folder.iterdir()) if _is_shared(path.name)]
            self.push(*(path for path in here if path.name != _HISTORY))
            self.push(*(path for path in here if path.name == _HISTORY))
            self._change(self._mine(lambda state: replace(state, ready=True)))
        if state.unclean:
            self._sweep()

    def renew(self, me: str, *, again: bool) -> bool:
        """Renew the lease, also `again` if it was just renewed; return False if it is lost, be it to a thread of this process."""
        with self._lock:
            if self._me != me:
                return False
            if not again and _elapsed() - self._renewed_at < _RENEWED_SECONDS:
                return True
            try:
                self._change(self._mine(lambda state: state))
            except LeaseLostError:
                return False
            return True

    def give_back(self, me: str) -> None:
        """Give the lease back; if the store does not answer, it expires by itself."""
        with self._lock:
            if self._me != me:
                return
            unclean = self._unclean
            try:
                self._change(self._mine(lambda state: replace(state, holder=None, unclean=state.unclean or unclean)))
            except LeaseLostError:
                pass
            finally:
                self._me = None
                self._unlock_folder()

    def holder(self) -> tuple[Mapping[str, Any], float] | None:
        """Return who holds the lease, and how many seconds ago it was renewed."""
        read = self._get()
        return (read.state.holder, read.silence) if read.state.holder is not None else None

    # What is shared

    def look(self) -> None:
        """Bring the small files up to date, for those who only read; the holder of the lease has them."""
        with self._lock:
            if self._me is not None or time.monotonic() - self._looked_at < _FRESH_SECONDS:
                return
            self._read = self._get()
            self._looked_at = time.monotonic()
            # Where another process of this machine works on the folder, it is up to date.
            if self._read.state.ready and self._lock_folder(0.0):
                try:
                    self._copy_down(self._read.state)
                finally:
                    self._unlock_folder()

    def has(self, path: Path) -> bool:
        """Whether the store has this file, or files below this folder."""
        return bool(self._listed(self._name(path)))

    def names(self, folder: Path) -> set[str]:
        """Return the names in a folder, as the store has them."""
        below = f"{self._name(folder)}/"
        return {name.removeprefix(below).partition("/")[0] for name in self._listed(below.rstrip("/"))}

    def is_whole(self, folder: Path) -> bool:
        """Whether each file of the folder is here or in the store, with its size."""
        return all(
            (self.folder / name).exists() or self._store.size(self._key(file)) == size
            for name, (file, size) in self._listed(self._name(folder)).items()
        )

    def fetch(self, *paths: Path) -> None:
        """Download what these files and folders have in the store and not here."""
        listed = [item for path in paths for item in self._listed(self._name(path)).items()]
        missing = [
            (self.folder / name, file, size) for name, (file, size) in listed if not (self.folder / name).exists()
        ]
        if not missing:
            return
        need_space(self.folder, sum(size for _, _, size in missing))
        with ThreadPoolExecutor(_AT_ONCE if len(missing) > 1 else 1) as pool:
            list(pool.map(lambda item: self._download(*item), missing))

    def _download(self, target: Path, file: str, size: int) -> None:
        with replaced_file(target) as beside:
            try:
                self._store.download(self._key(file), beside)
                whole = beside.stat().st_size == size
            except StateStoreError:
                if self._store.size(self._key(file)) is not None:
                    raise
                whole = False
            if not whole:
                raise StateStoreError(
                    f"{target} was kept in {self.shown}/{file}, and is gone or cut there. Nothing was guessed: run again, or with --full. "
                    "No rule of the bucket may expire or change these objects (docs/state.md)."
                )

    def write(self, path: Path, text: str | None) -> None:
        """Replace a small file in the store, or remove it; needs no lease.

        Only then is it changed here: before, a reader that copies from the store would undo it.
        """
        self._make_ready()
        name = self._name(path)

        def changed(read: _Read) -> _State:
            others = {other: value for other, value in read.state.texts.items() if other != name}
            return replace(read.state, texts=others if text is None else {**others, name: text})

        self._change(changed)

    def _make_ready(self) -> None:
        """Bring all that is here into a new store: not only what is about to be written."""
        if self._me is not None or self._current().state.ready:
            return
        me = uuid.uuid4().hex
        holder = {"id": me, "host": socket.gethostname(), "pid": os.getpid(), "purpose": "first use"}
        if self.take(holder, lambda _, age: age < _LOCK_SECONDS) is None:
            try:
                self.begin()
            finally:
                self.give_back(me)

    def push(self, *paths: Path) -> None:
        """Make the store show what is here below these paths, in one step."""
        names = [self._name(path) for path in paths]
        texts: dict[str, str] = {}
        files: dict[str, Sequence[Any]] = {}
        uploaded: list[str] = []
        if self._me is None:
            raise LeaseLostError(
                f"{self._unit}: the lease has ended, so nothing is written to {self.shown}. Run again."
            )
        try:
            known = self._known_files()
            for file in [file for path in paths for file in _files_below(path, self.folder)]:
                name = self._name(file)
                if _is_text(name):
                    texts[name] = _text(file)
                elif (here := _identity(file)) in known:
                    files[name] = known[here]
                else:
                    files[name] = (f"{_FILES}{uuid.uuid4().hex}-{file.name}", file.stat().st_size)
                    uploaded.append(files[name][0])
                    self._store.upload(self._key(files[name][0]), file)
            self._commit(names, texts, files, uploaded=uploaded)
        except LeaseLostError:
            # A write whose answer was lost may have listed them, and the new holder keeps what is listed.
            with suppress(OSError):
                self._store.delete([self._key(file) for file in set(uploaded) - self._referred()])
            raise
        except BaseException:
            # Perhaps the write was done: what is uploaded and not listed is for whoever takes the lease next to remove.
            self._unclean = True
            raise

    def drop(self, path: Path) -> None:
        """Remove a small file here and in the store, unless somebody else has written another one there."""
        name, text = self._name(path), _text(path)

        def changed(read: _Read) -> _State:
            same = read.state.texts.get(name) == text
            texts = {other: value for other, value in read.state.texts.items() if other != name or not same}
            return replace(read.state, texts=texts)

        self._change(changed)
        path.unlink(missing_ok=True)

    def _commit(
        self,
        names: Sequence[str],
        texts: Mapping[str, str],
        files: Mapping[str, Sequence[Any]],
        *,
        uploaded: list[str],
    ) -> None:
        history: str | None = None
        before: dict[str, Sequence[Any]] = {}
        listed: dict[str, Sequence[Any]] = {}
        if any(_below(name, _HISTORY) for name in names):
            before = self._history_files()
            now = {name: file for name, file in before.items() if not any(_below(name, gone) for gone in names)}
            history = f"{_FILES}{uuid.uuid4().hex}-{_HISTORY}.json"
            uploaded.append(history)
            listed = {**now, **files}
            self._store.put(self._key(history), json.dumps(listed).encode(), etag=None)
            files = {}

        def changed(state: _State) -> _State:
            def others(entries: Mapping[str, Any]) -> dict[str, Any]:
                return {name: value for name, value in entries.items() if not any(_below(name, gone) for gone in names)}

            return replace(
                state,
                texts={**others(state.texts), **texts},
                files={**others(state.files), **files},
                history=history or state.history,
            )

        if history is None and changed(self._current().state) == self._current().state:
            return
        old = self._change(self._mine(changed)).state
        if history is not None:
            self._history = (history, listed)
        gone = [
            file for name, (file, _) in {**old.files, **before}.items() if any(_below(name, other) for other in names)
        ]
        if history is not None and old.history is not None:
            gone.append(old.history)
        if gone:
            self._remove(gone)

    def _remove(self, files: Collection[str]) -> None:
        """Delete files that nothing refers to any more; a failure is for the next one to repair."""
        try:
            self._store.delete([self._key(file) for file in set(files) - self._referred()])
        except StateStoreError:
            self._unclean = True

    def _referred(self) -> set[str]:
        state = self._current().state
        listed = {file for file, _ in (*state.files.values(), *self._history_files().values())}
        return listed | ({state.history} if state.history else set())

    def _remove_unfinished(self) -> None:
        """Remove what was unfinished when a process died here: the work went on elsewhere, and nobody else would."""
        for path in [path for kind in (*_WHOLE, _HISTORY) for path in (self.folder / kind).glob(".*")]:
            if path.is_dir() and not path.name.startswith(_SPARE):
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file():
                path.unlink(missing_ok=True)

    def _check_conditions(self) -> None:
        """Raise if the store creates an object that is there, or replaces another one than was meant: two workers would have the lease."""
        trial = self._key(f"{_FILES}{uuid.uuid4().hex}-trial")
        self._store.put(trial, b"1", etag=None)
        try:
            for condition, etag in (("If-None-Match", None), ("If-Match", '"0"')):
                with suppress(ConflictError):
                    self._store.put(trial, b"2", etag=etag)
                    raise StateStoreError(
                        f"{self._store.address} ignores the conditions of writes ({condition}), so it cannot keep two workers apart. Nothing "
                        "was published. Set TIR_STATE to a store that knows them, or unset it and share TIR_HOME on a volume (docs/state.md)."
                    )
        finally:
            self._store.delete([trial])

    def _sweep(self) -> None:
        """Delete what somebody who died had uploaded and not listed, or taken off the list and not deleted."""
        self._store.abort_uploads(f"{self._unit}/{_FILES}")
        prefix = f"{self._unit}/"
        there = {key.removeprefix(prefix) for key in self._store.keys(prefix + _FILES)}
        if left := there - self._referred():
            self._store.delete([self._key(file) for file in left])
        self._change(self._mine(lambda state: replace(state, unclean=False)))

    def _copy_down(self, state: _State) -> None:
        for folder in [path for kind in _WHOLE for path in (self.folder / kind).glob("[!.]*") if path.is_dir()]:
            here = {self._name(file): _text(file) for file in _files_below(folder, self.folder) if _is_text(file.name)}
            name = self._name(folder)
            if not here or here != {other: text for other, text in state.texts.items() if _below(other, name)}:
                shutil.rmtree(folder, ignore_errors=True)
        for path in _files_below(self.folder, self.folder):
            name = self._name(path)
            if _is_text(name) and name not in state.texts and not _below(name, _HISTORY):
                path.unlink(missing_ok=True)
        for name, text in state.texts.items():
            path = self.folder / name
            if not path.is_file() or _text(path) != text:
                private_folder(self.folder)
                with replaced_file(path) as beside:
                    beside.write_text(text, encoding="utf-8", errors="surrogateescape")

    # Names, lists and writes

    def _name(self, path: Path) -> str:
        return path.absolute().relative_to(self.folder).as_posix()

    def _key(self, file: str) -> str:
        return f"{self._unit}/{file}"

    def _listed(self, name: str) -> dict[str, Sequence[Any]]:
        files = self._history_files() if _below(name, _HISTORY) else self._current().state.files
        return {other: file for other, file in files.items() if _below(other, name)}

    def _history_files(self) -> dict[str, Sequence[Any]]:
        file = self._current().state.history
        if self._history[0] != file:
            stored = None if file is None else self._store.get(self._key(file))
            if stored is None and file is not None and self._me is None:
                # Replaced since this reader looked.
                self._read = self._get()
                file = self._read.state.history
                stored = None if file is None else self._store.get(self._key(file))
            # Lost, `tir why` knows less; what it listed is removed when somebody cleans up.
            self._history = (file, json.loads(stored.body) if stored is not None else {})
        return self._history[1]

    def _known_files(self) -> dict[tuple[int, int], Sequence[Any]]:
        """Return the files that other places are linked to: what a change set has is not uploaded again for the history."""
        known = {}
        for name, file in self._current().state.files.items():
            with suppress(OSError):
                if _below(name, _WHOLE[0]):
                    known[_identity(self.folder / name)] = file
        return known

    def _current(self) -> _Read:
        with self._lock:
            if self._read is None:
                self._read = self._get()
            return self._read

    def _get(self) -> _Read:
        stored = self._store.get(self._key(_STATE))
        if stored is None:
            return _Read(_State(), None, 0.0)
        try:
            return _Read(_State(**json.loads(stored.body)), stored.etag, stored.age)
        except (ValueError, TypeError) as error:
            raise StateStoreError(
                f"{self.shown}/{_STATE} cannot be read. Nothing was touched. Restore an earlier version of this object if the bucket keeps "
                "them, or remove it: then the next refresh loads everything."
            ) from error

    def _mine(self, update: Callable[[_State], _State]) -> Callable[[_Read], _State]:
        def checked(read: _Read) -> _State:
            holder = read.state.holder
            if holder is None or holder["id"] != self._me:
                # Now known to be lost, however short a time ago it was renewed: `renew` must ask.
                self._renewed_at = float("-inf")
                raise LeaseLostError(
                    f"{self._unit}: somebody else has the lease in {self.shown}, so nothing was written there. Run again when they are done."
                )
            return update(read.state)

        return checked

    def _change(self, update: Callable[[_Read], _State]) -> _Read:
        """Replace the state by what `update` makes of it, as one step among all workers; return what was there before."""
        with self._lock:
            if self._me is None:
                # How long the holder has been silent is counted from now.
                self._read = None
            read = self._current()
            for _ in range(_MOST_CONFLICTS):
                state = update(read)
                holders = state.holder, read.state.holder
                by_holder = holders[0] != holders[1] or (holders[0] is not None and holders[0]["id"] == self._me)
                state = replace(state, write=uuid.uuid4().hex, idle=0.0 if by_holder else read.silence)
                began = _elapsed()
                try:
                    etag = self._store.put(self._key(_STATE), json.dumps(asdict(state)).encode(), etag=read.etag)
                except ConflictError:
                    now = self._get()
                    if now.state.write != state.write:
                        # Somebody else wrote; whether that ends our lease is for `update` to say.
                        self._read = read = now
                        continue
                    etag = str(now.etag)
                self._read, self._renewed_at = _Read(state, etag, 0.0), began
                return read
        raise StateStoreError(f"{self.shown}/{_STATE} is written by others all the time. Run again.")

    def _lock_folder(self, seconds: float) -> bool:
        """Keep other processes of this machine from copying into the folder; return whether that succeeded."""
        private_folder(self.folder)
        lock = (self.folder / _LOCK).open("w")
        for _ in looks(seconds, pause=lambda _: 0.05):
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._folder_lock = lock
                return True
        lock.close()
        return False

    def _unlock_folder(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.close()
            self._folder_lock = None


def _below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}/")


def _is_shared(name: str) -> bool:
    return not name.startswith((".", "lease")) and name not in _OWN


def _is_text(name: str) -> bool:
    return name.endswith(".json") and not _below(name, _HISTORY)


def _files_below(path: Path, unit: Path) -> Iterator[Path]:
    """Yield the shared files below a path of a unit, without unfinished and scratch files."""
    if path.is_dir():
        # Tables of an extract have any names, such as `plan` or `leases`.
        is_of_tables = path != unit and path.name == TABLES
        for inner in sorted(path.iterdir()):
            if is_of_tables or _is_shared(inner.name):
                yield from _files_below(inner, unit)
    elif path.is_file():
        yield path


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="surrogateescape")


def _identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_dev, status.st_ino


def _elapsed() -> float:
    """Return seconds of a clock that goes on while this machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# The homes of this process that are mounted

_homes: dict[Path, str] = {}
_mirrors: dict[Path, Mirror] = {}
_mounting = threading.Lock()


def mount(home: Path, address: str) -> None:
    """Let the state below `home` be a copy of what the store at this address holds, for this process."""
    _homes[home.absolute()] = checked_address(address)


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror that a path belongs to; None for a local folder."""
    if not _homes:
        return None
    path = path.absolute()
    home = next((home for home in _homes if path.is_relative_to(home)), None)
    if home is None:
        return None
    names = path.relative_to(home).parts
    names = names[: _UNITS.get(names[0], 0)] if names else ()
    if not names:
        return None
    folder = home.joinpath(*names)
    with _mounting:
        if folder not in _mirrors:
            _mirrors[folder] = Mirror(S3Store(_homes[home]), "/".join(names), folder)
        return _mirrors[folder]


def look(path: Path) -> None:
    """Bring the small files around a path up to date, if they are shared; call it before reading them."""
    if mirror := mirror_of(path):
        mirror.look()


def fetched(path: Path) -> Path:
    """Return a path of the state; what the store has of it is there."""
    if mirror := mirror_of(path):
        mirror.fetch(path)
    return path


def is_stored(path: Path) -> bool:
    """Whether the store has this file, or files below this folder."""
    mirror = mirror_of(path)
    return mirror is not None and mirror.has(path)


def drop(path: Path) -> None:
    """Remove a small file, unless another worker has written another one under its name."""
    if mirror := mirror_of(path):
        mirror.drop(path)
    path.unlink(missing_ok=True)


def push(*paths: Path) -> None:
    """Make what is here below these paths, or is not here any more, durable for all workers, in one step."""
    if paths and (mirror := mirror_of(paths[0])):
        mirror.push(*paths)


def write(path: Path, text: str | None) -> None:
    """Replace a small file, or remove it, for all workers; needs no lease."""
    if mirror := mirror_of(path):
        mirror.write(path, text)
    if text is None:
        path.unlink(missing_ok=True)
    else:
        with replaced_file(path) as beside:
            beside.write_text(text, encoding="utf-8")
