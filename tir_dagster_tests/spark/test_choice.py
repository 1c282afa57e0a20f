"""Which Spark a run uses, what its executors get, and that no token is shown. Without any Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkException

from tir_dagster.cli.main import tir
from tir_dagster.errors import SourceError, SpecError
from tir_dagster.spark.choice import choose_spark
from tir_dagster.spark.connect import channel_of
from tir_dagster.spark.failures import spark_failures
from tir_dagster.spark.package import TASK_PACKAGES, write_archive
from tir_dagster.spark.remote import Remote
from tir_dagster.spec.reading import parse_declared, spark_from_mapping

DATABRICKS = "sc://adb-1.azuredatabricks.net:443/;token=dapi-secret==;x-databricks-cluster-id=0123-456-cluster"
BLOCK = spark_from_mapping(
    {"master": "spark://block:7077", "config": {"spark.executor.memory": "4g"}, "staging": "s3://bucket/block"}
).settings()
ON_REMOTE = spark_from_mapping({"remote": "sc://block:15002"}).settings()


def chosen(home: Path, env: dict[str, str], configured: dict[str, str]) -> str:
    return choose_spark(env, configured, home, pytest.fail).sentence


@pytest.mark.parametrize(
    ("env", "configured", "sentence"),
    [
        ({"SPARK_REMOTE": "sc://variable:1", "TIR_SPARK_MASTER": "yarn"}, BLOCK, "using Spark at variable:1"),
        ({"TIR_SPARK_MASTER": "yarn"}, BLOCK, "starting Spark on yarn"),
        ({"TIR_SPARK_MASTER": "local[2]"}, ON_REMOTE, "starting Spark"),
        ({}, BLOCK, "starting Spark on spark://block:7077"),
        ({}, ON_REMOTE, "using Spark at block:15002"),
        ({}, {}, "starting Spark"),
    ],
)
def test_the_first_that_is_set_decides(env, configured, sentence, tmp_path):
    assert chosen(tmp_path, env, configured) == sentence


def test_settings_follow_the_spark_that_they_are_for_and_staging_follows_the_rows(tmp_path):
    by_master = choose_spark({"TIR_SPARK_MASTER": "yarn"}, BLOCK, tmp_path, pytest.fail)
    by_remote = choose_spark({"SPARK_REMOTE": "sc://other"}, BLOCK, tmp_path, pytest.fail)
    by_variable = choose_spark({"TIR_STAGING": "/mnt/rows"}, BLOCK, tmp_path, pytest.fail)

    assert by_master.settings["spark.executor.memory"] == "4g"
    assert "spark.executor.memory" not in by_remote.settings
    assert by_remote.settings["spark.tir.staging"] == "s3://bucket/block"
    assert by_variable.settings["spark.tir.staging"] == "/mnt/rows"
    with pytest.raises(SourceError, match="TIR_STAGING, or `staging` in the spec file"):
        choose_spark({"TIR_STAGING": "ftp"}, {}, tmp_path, pytest.fail)


def test_the_form_of_databricks_becomes_a_token_a_header_and_tls():
    remote = Remote.parse(DATABRICKS, {})
    channel = channel_of(remote)

    assert (channel.token, channel.secure, channel.endpoint) == ("dapi-secret==", True, "adb-1.azuredatabricks.net:443")
    assert ("x-databricks-cluster-id", "0123-456-cluster") in channel.metadata()
    assert "dapi" not in remote.address + repr(remote) + remote.name + remote.advice


def test_a_token_of_its_own_variable_is_used_for_an_address_without_one():
    env = {"SPARK_CONNECT_AUTHENTICATE_TOKEN": "of the variable"}

    assert Remote.parse("sc://host", env).token == "of the variable"
    assert Remote.parse(DATABRICKS, env).token == "dapi-secret=="


@pytest.mark.parametrize(
    "address", ["sc://host:1/path/;token=hunter2", "sc://host/;token=hunter2;flag", "host;hunter2"]
)
def test_an_address_with_a_token_that_cannot_be_read_is_refused_unshown(address):
    with pytest.raises(SourceError, match=r"`spark:` is no address of a Spark Connect server") as caught:
        Remote.parse(address, {}, "`spark:`")

    assert "hunter2" not in str(caught.value)


def test_no_error_shows_a_token_or_a_header_of_the_address():
    remote = Remote.parse(DATABRICKS, {})

    with pytest.raises(SourceError) as caught, spark_failures("trying", remote):
        raise PySparkException(f"refused {remote.token} for 0123-456-cluster at {DATABRICKS}")

    assert "dapi" not in str(caught.value)
    assert "0123-456" not in str(caught.value)


def test_workers_without_our_packages_are_an_error_that_says_what_to_install():
    error = PySparkException("Traceback …\nModuleNotFoundError: No module named 'pyarrow'\n")

    with (
        pytest.raises(SourceError, match=r"'pyarrow'\. Give .* `tir spark requirements`"),
        spark_failures("staging rows"),
    ):
        raise error


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("{master: mesos://x}", "spark.master: write spark://host:7077"),
        ("{master: yarn, remote: 'sc://x'}", "give `master` or `remote`, not both"),
        (
            "{remote: 'sc://x/;token=hunter2'}",
            "leave the token out; set it in the variable SPARK_CONNECT_AUTHENTICATE_TOKEN",
        ),
        ("{config: {executor.memory: 4g}}", "names of Spark's settings begin with `spark.`"),
        ("{config: {spark.hadoop.fs.s3a.secret.key: hunter2}}", "secrets do not belong into this file"),
        ("{config: {spark.master: yarn}}", "give it as `master`, beside `config`"),
        ("{staging: 'https://x/y'}", "is no staging place"),
        ("{staging: 's3://x', staging_lifetime: 1 minute}", "give at least 10 minutes"),
    ],
)
def test_a_block_that_cannot_work_is_refused_with_its_line(block, problem):
    with pytest.raises(SpecError) as caught:
        parse_declared(f"loads: []\nspark: {block}\n", "specs.yaml")

    assert problem in str(caught.value)
    assert str(caught.value).startswith("specs.yaml:2: spark.")
    assert "hunter2" not in str(caught.value)


def test_the_name_of_a_secret_in_kubernetes_is_none():
    name = "spark.kubernetes.executor.secretKeyRef.AWS_SECRET_ACCESS_KEY"

    assert spark_from_mapping({"config": {name: "staging:key"}}).settings()[name] == "staging:key"


def test_the_block_of_the_documentation_is_one():
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    block = text.partition("```yaml\n")[2].partition("```")[0]

    declared = parse_declared(f"loads: []\n{block}", "docs/spark.md").spark

    assert declared is not None
    assert declared.settings() == {
        "spark.master": "spark://spark.example.com:7077",
        "spark.executor.memory": "4g",
        "spark.pyspark.python": "/opt/tir/bin/python",
        "spark.tir.staging": "s3://mybucket/staging",
        "spark.tir.staging.lifetime": "86400",
    }


def test_the_block_for_kubernetes_in_the_documentation_is_one():
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    block = text.partition("### Kubernetes and YARN")[2].partition("```yaml\n")[2].partition("```")[0]

    declared = parse_declared(f"loads: []\n{block}", "docs/spark.md").spark

    assert declared is not None
    assert declared.settings()["spark.master"].startswith("k8s://")


def test_the_archive_has_all_of_the_package_that_tasks_import_and_the_requirements_name_the_rest(tmp_path):
    """What each module of a task loads, in a Python that finds tir_dagster in the archive only."""
    script = """
import json, sys
import tir_dagster.spark.staging, tir_dagster.loading.staging, tir_dagster.spark.places, tir_dagster.spark.failures
import pyarrow.fs, snowflake.connector.result_batch
origins = {name: str(module.__file__) for name, module in sys.modules.items() if name.startswith("tir_dagster")}
print(json.dumps([origins, sorted(name for name in sys.modules if "." not in name)]))
"""
    archive = write_archive(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(archive)!r})\n{script}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=120,
    )
    origins, modules = json.loads(run.stdout)

    assert {origin for origin in origins.values() if not origin.startswith(str(archive))} == set()
    # Neither Dagster nor Hyper nor a parser of YAML.
    assert set(modules) & {"dagster", "tableauhyperapi", "yaml", "sqlglot", "requests_oauthlib"} == set()
    printed = CliRunner().invoke(tir, ["spark", "requirements"]).stdout.splitlines()
    assert printed[0] == f"# for Python {sys.version_info.major}.{sys.version_info.minor}"
    assert [line.partition("==")[0] for line in printed[1:]] == list(TASK_PACKAGES)
