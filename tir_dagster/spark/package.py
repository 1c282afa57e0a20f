"""What tasks import of this package, as an archive that travels to executors which do not have it."""

from __future__ import annotations

import atexit
import hashlib
import io
import shutil
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The rooms that tasks import, beside the modules at the top of the package.
TASK_ROOMS = ("snowflake", "spec", "spark", "loading")
# What tasks import of others: the executors' own environment has to have it.
TASK_PACKAGES = ("pyarrow", "snowflake-connector-python", "pydantic", "tenacity")
_PACKAGE = Path(__file__).parents[1]


def task_modules() -> list[Path]:
    """Return the files of the modules that tasks may import."""
    rooms = (file for room in TASK_ROOMS for file in (_PACKAGE / room).rglob("*.py"))
    return sorted([*_PACKAGE.glob("*.py"), *rooms])


def archive_bytes() -> bytes:
    """Return the archive; the same code gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in task_modules():
            entry = zipfile.ZipInfo(str(file.relative_to(_PACKAGE.parent)), date_time=(2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    return buffer.getvalue()


def write_archive(folder: Path) -> Path:
    """Write the archive under a name that tells its content: Spark refuses another file of the same name."""
    content = archive_bytes()
    file = folder / f"tir_dagster-{hashlib.sha256(content).hexdigest()[:12]}.zip"
    file.write_bytes(content)
    return file


@cache
def _archive() -> Path:
    """The archive of this process; Spark serves the file itself, as long as the process lives."""
    folder = Path(tempfile.mkdtemp(prefix="tir-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_archive(folder)


def send_code(session: SparkSession) -> None:
    """Let the session's executors import the package as it is here, whether they have one of their own or none."""
    if getattr(session, "_sc", None) is None:
        session.addArtifacts(str(_archive()), pyfile=True)
        return
    if _archive().name in (session.sparkContext._python_includes or ()):  # noqa: SLF001 - Spark would only warn
        return
    paths = list(sys.path)
    session.sparkContext.addPyFile(str(_archive()))
    # Spark would import it here, too, in place of this installation.
    sys.path[:] = paths
