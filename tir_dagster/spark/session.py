"""Spark sessions, with settings for small machines and those that correct values depend on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkContext, java_gateway
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tir_dagster.errors import SourceError
from tir_dagster.spark.package import send_code

# What a session must have, wherever it comes from: values would look different without.
_REQUIRED = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # INT96, Spark's other way, is one that Hyper does not read.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # 0001-01-01 and 9999-12-31 are ordinary values in tables; the old calendar would refuse or shift them.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
}

_SMALL = {
    "spark.master": "local[*]",
    "spark.sql.adaptive.enabled": "true",
    # 200, the default, doubles the time of a join of five million rows on two cores.
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.python.worker.reuse": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.parquet.compression.codec": "zstd",
}


def spark_conf(*, home: Path, conf: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The settings of a session; `conf` overrides the defaults, except those that correct values depend on."""
    user_settings = {name: str(value) for name, value in (conf or {}).items()}
    on_cluster = not user_settings.get("spark.master", "local").startswith("local")
    folders = {
        # Executors elsewhere have their own folders: this path may not exist there.
        **({} if on_cluster else {"spark.local.dir": str(home / "spark" / "local")}),
        "spark.sql.warehouse.dir": (home / "spark" / "warehouse").absolute().as_uri(),
    }
    # Without memory the JVM ends: one that lives on half dead never answers, and the refresh would wait for ever.
    flags = "-XX:+IgnoreUnrecognizedVMOptions -XX:+ExitOnOutOfMemoryError"
    options = f"-Dderby.system.home={home / 'spark'} {flags} {_archive_options(home)}".strip()
    return {**_SMALL, **folders, "spark.driver.extraJavaOptions": options, **user_settings, **_REQUIRED}


def use_this_python(settings: Mapping[str, str] | None = None) -> None:
    """Workers of this machine run this interpreter: another one lacks our packages. Those of a cluster have their own."""
    if not (settings or {}).get("spark.master", "local").startswith("local"):
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def spark_session(app_name: str, *, home: Path, conf: Mapping[str, Any] | None = None) -> SparkSession:
    """Return the session of this process; start it if there is none."""
    settings = spark_conf(home=home, conf=conf)
    use_this_python(settings)
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        with ended_if_interrupted():
            return configure(builder.getOrCreate())
    except (PySparkException, OSError) as error:
        message = " ".join(str(error).split())[:300]
        raise SourceError(
            f"Spark did not start: {message}. It needs Java 17 or 21: check `java -version` and JAVA_HOME."
        ) from error


@contextmanager
def ended_if_interrupted() -> Iterator[None]:
    """End a JVM that is still starting when the block is interrupted.

    pyspark then removes the folder to which the JVM writes its address; the JVM fails there, and would live on for ever.
    """
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self)

    real = java_gateway.Popen
    # pyspark hands the process out only once it is up.
    java_gateway.Popen = Noted  # type: ignore[misc,assignment]
    try:
        yield
    except BaseException:
        # One that was up already ends with this process.
        if SparkContext._gateway is None:  # noqa: SLF001 - nobody else knows
            for process in started:
                process.kill()
                process.wait()
        raise
    finally:
        java_gateway.Popen = real  # type: ignore[misc]


@contextmanager
def jvm_output(home: Path) -> Iterator[None]:
    """Let a JVM that starts inside the block write to a log file, not to standard error, until it ends.

    Spark's first lines come before any of its settings count, and Java's warning of its own incubator modules cannot
    be turned off at all.
    """
    file = home / "spark" / "driver.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    try:
        with file.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def configure(spark: SparkSession, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Give a session made elsewhere (dagster-pyspark, Spark Connect) these settings, and those that values depend on."""
    for name, value in {**(settings or {}), **_REQUIRED}.items():
        if spark.conf.get(name, None) != value:
            spark.conf.set(name, value)
    context = getattr(spark, "_sc", None)
    if context is not None and not context.master.startswith("local"):
        # Spark reads this setting only in spark-submit.
        context.pythonExec = context.getConf().get("spark.pyspark.python", context.pythonExec)
        send_code(spark)
    elif context is not None and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable
    return spark


def class_archive(home: Path) -> Path:
    """Where the JVM's class archive for this Spark is kept."""
    return home / "spark" / f"classes-{pyspark.__version__}.jsa"


def build_class_archive(*, home: Path) -> Path:
    """Start Spark once in a process of its own and keep the classes it loaded: later starts are faster. About 150 MB."""
    archive = class_archive(home)
    archive.parent.mkdir(parents=True, exist_ok=True)
    script = f"from tir_dagster.spark.session import _dump; _dump({str(archive)!r})"
    use_this_python()
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    if completed.returncode or not archive.is_file():
        raise SourceError(
            f"The class archive {archive} was not created: {completed.stderr.strip()[-300:]}. Sessions start without it."
        )
    return archive


def _dump(archive: str) -> None:
    """Run what every refresh runs, in a JVM that writes its classes to the archive when it ends."""
    beside = f"{archive}.new"
    options = f"-XX:ArchiveClassesAtExit={beside} -Xlog:cds=off -Xlog:cds+dynamic=off"
    with tempfile.TemporaryDirectory(prefix="tir-classes-") as folder:
        spark = spark_session("tir class archive", home=Path(folder), conf={"spark.driver.extraJavaOptions": options})
        _rehearse(spark, Path(folder))
        gateway = spark.sparkContext._gateway  # noqa: SLF001 - the JVM writes the archive when it ends by itself
        spark.stop()
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=120)
    Path(beside).replace(archive)


def _rehearse(spark: SparkSession, folder: Path) -> None:
    """Run what a refresh asks of Spark: tasks of our own in Python workers."""
    from tir_dagster.spark.staging import rehearse

    del folder
    rehearse(spark)


def _archive_options(home: Path) -> str:
    archive = class_archive(home)
    # A JVM of another version passes the archive over; with the log off it does so silently.
    return f"-XX:SharedArchiveFile={archive} -Xshare:auto -Xlog:disable" if archive.is_file() else ""
