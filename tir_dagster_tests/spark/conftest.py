"""One Spark session for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tir_dagster.spark.session import spark_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = spark_session("tir tests", home=tmp_path_factory.mktemp("spark-home"), conf={"spark.master": "local[2]"})
    yield session
    session.stop()
