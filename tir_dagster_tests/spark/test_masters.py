"""What reaches Spark of a master that cannot be run here: a stand-in of spark-submit notes how it was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

# Notes its arguments and variables, and ends like a Spark that finds no cluster.
SUBMIT = """#!{python}
import json, os, sys
with open({noted!r}, "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
sys.exit(1)
"""
DRIVER = """
import sys
from pathlib import Path
from tir_dagster.errors import TirError
from tir_dagster.orchestration.resources import SparkSettings, spark_session
from tir_dagster.spec.reading import parse_declared
block = parse_declared(Path(sys.argv[1]).read_text(), "specs.yaml").spark
try:
    spark_session(SparkSettings(spark_config=block.settings()), Path(sys.argv[2]), log=print)
except TirError as error:
    print(error)
"""
BLOCKS = {
    "yarn": """
  config:
    spark.yarn.queue: reports
    spark.submit.deployMode: client
    spark.executor.instances: 4
    spark.yarn.dist.archives: hdfs:///envs/tir.tar.gz#tir
    spark.pyspark.python: ./tir/bin/python
    spark.executorEnv.REQUESTS_CA_BUNDLE: /etc/ssl/own.pem
""",
    "k8s://https://kubernetes.example.com:6443": """
  config:
    spark.kubernetes.container.image: registry.example.com/tir-executors:1
    spark.kubernetes.namespace: spark
    spark.kubernetes.executor.secretKeyRef.AWS_SECRET_ACCESS_KEY: staging:key
    spark.executor.memory: 4g
    spark.dynamicAllocation.enabled: true
""",
}
SECRETS = {"SNOWFLAKE_PASSWORD": "hunter2-snowflake", "TABLEAU_TOKEN_SECRET": "hunter2-tableau"}


@pytest.mark.parametrize(("master", "by"), [*zip(BLOCKS, ["variable", "block"], strict=True)])
def test_the_settings_of_the_block_reach_spark_submit(master, by, tmp_path):
    noted, specs = tmp_path / "noted.json", tmp_path / "specs.yaml"
    submit = tmp_path / "spark" / "bin" / "spark-submit"
    submit.parent.mkdir(parents=True)
    submit.write_text(SUBMIT.format(python=sys.executable, noted=str(noted)), encoding="utf-8")
    submit.chmod(0o755)
    named = f"\n  master: {master}" if by == "block" else ""
    staging = "\n  staging: s3://mybucket/staging"
    specs.write_text(f"loads: []\nspark:{named}{staging}{BLOCKS[master]}", encoding="utf-8")
    env = {**os.environ, **SECRETS, "SPARK_HOME": str(tmp_path / "spark")}
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_REMOTE", "TIR_SPARK_MASTER", "TIR_STAGING"):
        env.pop(name, None)
    if by == "variable":
        env["TIR_SPARK_MASTER"] = master

    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(specs), str(tmp_path / "home")],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    arguments, variables = json.loads(noted.read_text(encoding="utf-8"))
    given = [words for words in pairwise(arguments) if words[0] == "--conf"]
    settings = dict(words[1].split("=", 1) for words in given)
    assert settings["spark.master"] == master
    written = dict(line.strip().split(": ", 1) for line in BLOCKS[master].split("config:\n")[1].splitlines())
    assert {name: settings.get(name) for name in written} == written
    assert (settings["spark.tir.staging"], settings["spark.sql.session.timeZone"]) == ("s3://mybucket/staging", "UTC")
    assert "spark.local.dir" not in settings, "a folder of this machine"
    assert "PYSPARK_PYTHON" not in variables, "executors have a Python of their own"
    assert f"starting Spark on {master}" in done.stdout
    assert "Spark did not start" in done.stdout
    assert f"Check that {master} is reached from here" in done.stdout
    assert [secret for secret in SECRETS.values() if secret in " ".join(arguments)] == []
