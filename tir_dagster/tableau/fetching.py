"""One file on its way here: continued after a cut where the server lets us, from the first byte where it does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.found import FoundDatasource
from tir_dagster.tableau.progress import Progress
from tir_dagster.tableau.transport import Timeouts, patience

_BLOCK = 1024 * 1024
_SPARE_BYTES = 16 * 1024 * 1024
# The same time is also how long a connection may be silent in the middle of a file.
_MOST_PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Came:
    """How much of which version of a file is here; an empty mark means that it cannot be continued."""

    mark: str
    size: int

    def goes_on_from(self, before: Came, least: int) -> bool:
        """Whether so much more of the same version came since, or of the first one."""
        return bool(self.mark) and before.mark in ("", self.mark) and self.size - before.size >= least


@dataclass
class Fetching:
    """A download into an open file. Call it with the signed-in server until it returns.

    Two versions of a datasource never mix in one file: what came before a cut is continued only if the server names the
    same strong ETag and the same length for both parts.
    """

    found: FoundDatasource
    # Below the datasource's address: `content`, or an older revision's.
    what: str
    out: IO[bytes]
    folder: Path
    timeouts: Timeouts
    progress: Progress | None = None
    _mark: str = field(default="", init=False)
    _total: int | None = field(default=None, init=False)

    @property
    def came(self) -> Came:
        return Came(self._mark, self.out.tell())

    def __call__(self, server: Any) -> None:
        if not self._mark or not self.out.tell():
            self._fetch_all(server)
        elif self.out.tell() != self._total:
            self._continue(server)
        self.out.flush()

    def _fetch_all(self, server: Any) -> None:
        with closing(self._ask(server, {})) as answer:
            self._begin(answer)
            self._take(answer)

    def _continue(self, server: Any) -> None:
        start = self.out.tell()
        with closing(self._ask(server, {"Range": f"bytes={start}-", "If-Range": self._mark})) as answer:
            part = answer.headers.get("Content-Range")
            if part is None:
                # All of it: of another version, or because the server gives no parts.
                self._begin(answer)
            if part is None or self._fits(part, start, answer.headers.get("ETag", "")):
                self._take(answer)
                return
        self._fetch_all(server)

    def _ask(self, server: Any, headers: Mapping[str, str]) -> Any:
        endpoint, size = server.datasources, (self.found.size_mb or 0) * _BLOCK
        # Bytes as they are stored: a range of what was compressed on the way is another range.
        asked = {"stream": True, "headers": {"Accept-Encoding": "identity", **headers}}
        with patience(min(self.timeouts.for_bytes(size), _MOST_PATIENCE_SECONDS)):
            return endpoint.get_request(f"{endpoint.baseurl}/{self.found.id}/{self.what}", parameters=asked)

    def _begin(self, answer: Any) -> None:
        self.out.seek(0)
        self.out.truncate()
        length, mark = answer.headers.get("Content-Length", ""), answer.headers.get("ETag", "")
        self._total = int(length) if length.isdigit() else None
        self._mark = mark if mark.startswith('"') and self._total is not None else ""
        wanted = (self.found.size_mb or 0) * _BLOCK if self._total is None else self._total
        _check_room(self.folder, wanted, self.found)

    def _fits(self, part: str, start: int, mark: str) -> bool:
        said = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", part)
        return said is not None and (int(said[1]), int(said[2]), mark) == (start, self._total, self._mark)

    def _take(self, answer: Any) -> None:
        for block in answer.iter_content(_BLOCK):
            self.out.write(block)
            if self.progress is not None:
                self.progress(self.out.tell(), max(self._total or 0, self.out.tell()))


def _check_room(folder: Path, wanted: int, found: FoundDatasource) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted + _SPARE_BYTES:
        raise DatasourceError(
            f"No room to download {found.shown}: it has {wanted / 1e6:.0f} MB, and {folder} has {free / 1e6:.0f} MB"
            " free. Free some space or move TIR_HOME to a larger disk."
        )
