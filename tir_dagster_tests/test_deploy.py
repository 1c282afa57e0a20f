"""The files in deploy/: everything that they name exists, every command is one that its program takes, no secret is in them.

Docker, compose and helm are not needed: their files are read as what they are. What these tests cannot show is listed in
docs/deploying.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest
import yaml

from tir_dagster.orchestration.home import DAGSTER_YAML
from tir_dagster.refresh.state.objects import S3Store
from tir_dagster.spark.connect import connect_session
from tir_dagster.spark.places import StagingPlace
from tir_dagster.spark.remote import Remote
from tir_dagster.spark.staging import rehearse
from tir_dagster_tests.processes import free_port, listening, running

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((DEPLOY / "values.yaml").read_text(encoding="utf-8"))
OBJECT_STORE = yaml.safe_load((DEPLOY / "object-store.yaml").read_text(encoding="utf-8"))
DOCS = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
(CODE,) = VALUES["dagster-user-deployments"]["deployments"]
(STORED,) = OBJECT_STORE["dagster-user-deployments"]["deployments"]
# Of the image itself; what the project reads is sought in its sources.
FOREIGN_VARIABLES = {
    "DAGSTER_HOME",
    "PATH",
    "PYTHONUNBUFFERED",
    "POSTGRES_USER",
    "POSTGRES_PASSWORD",
    "POSTGRES_DB",
    "PYSPARK_PYTHON",
}
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|PRIVATE_KEY", re.IGNORECASE)
# What a service of the compose specification may have; only what is used here.
SERVICE_KEYS = {
    *(
        "build",
        "cap_drop",
        "command",
        "depends_on",
        "env_file",
        "environment",
        "healthcheck",
        "image",
        "init",
        "mem_limit",
    ),
    *("ports", "profiles", "restart", "security_opt", "volumes"),
}


def parse(words: list[str]) -> None:
    """Let the program itself parse the command; raise click's error for anything that it does not take."""
    (script,) = entry_points(group="console_scripts", name=words[0])
    command, args, name = script.load(), words[1:], words[0]
    if not isinstance(command, click.Command):
        # Programs that wrap their command in a function.
        command = {"dagster": "dagster._cli:cli", "dagster-daemon": "dagster._daemon.cli:cli", "dagster-webserver": "dagster_webserver.cli:dagster_webserver", "tir": "tir_dagster.cli.main:tir"}[name]  # fmt: skip
        module, _, attribute = command.partition(":")
        command = getattr(__import__(module, fromlist=[attribute]), attribute)
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        name = args.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{' '.join(words)}: there is no {name}"
        command = found
    command.make_context(name, args)


def commands() -> dict[str, list[str]]:
    """Every command of ours that the files start, by where it stands."""
    found = {
        f"service {name}": service["command"] for name, service in COMPOSE["services"].items() if "command" in service
    }
    found["health of code"] = COMPOSE["services"]["code"]["healthcheck"]["test"][1:]
    found["values.yaml"] = ["dagster", "code-server", "start", "--port", str(CODE["port"]), *CODE["codeServerArgs"]]
    found |= {f"docs: {line}": shlex.split(line) for line in shown_commands() if line.split()[0] in ("tir", "dagster")}
    # Where the files are before they are in the image.
    here = {where: [word.replace("/opt/dagster/", f"{DEPLOY}/") for word in words] for where, words in found.items()}
    return {where: words for where, words in here.items() if words[0] != "spark-submit"}


def shown_commands() -> list[str]:
    lines = [
        line.removeprefix("    ").partition("  #")[0].strip() for line in DOCS.splitlines() if line.startswith("    ")
    ]
    return [line for line in lines if re.match(r"(docker|helm|kubectl|tir|dagster|export) ", line)]


@pytest.mark.parametrize("where", commands())
def test_every_command_is_one_that_its_program_takes(where):
    parse(list(commands()[where]))


def test_a_command_that_its_program_does_not_take_is_noticed():
    with pytest.raises(click.NoSuchOption):
        parse(["dagster-daemon", "run", "--workspaces", "x"])


def test_services_have_only_what_compose_knows_and_name_only_what_is_there():
    assert set(COMPOSE) <= {"name", "services", "volumes", "x-tir", "x-history"}
    for name, service in COMPOSE["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        image = service["image"]
        assert re.fullmatch(r"[a-z-]+:[0-9][\w.-]+", image), f"{name}: {image} is not pinned"
        assert set(service.get("depends_on", {})) <= COMPOSE["services"].keys()
        assert service.get("mem_limit") or name == "postgres", f"{name} may take all memory"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or source == "../extracts.yaml", volume
    own = [service for service in COMPOSE["services"].values() if service["image"] == COMPOSE["x-tir"]["image"]]
    assert all({"init", "cap_drop", "security_opt"} <= service.keys() for service in own)
    assert (DEPLOY / COMPOSE["x-tir"]["build"]["context"]).resolve() == ROOT
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports), "pages have no login of their own"


def test_workspace_and_addresses_name_services_and_the_ports_that_they_serve():
    services = COMPOSE["services"]
    (location,) = yaml.safe_load((DEPLOY / "workspace.yaml").read_text(encoding="utf-8"))["load_from"]
    server = location["grpc_server"]
    assert str(server["port"]) in services[server["host"]]["command"]
    host, port = services["code"]["environment"]["SPARK_REMOTE"].removeprefix("sc://").split(":")
    assert f"--conf=spark.connect.grpc.binding.port={port}" in services[host]["command"]
    assert services["code"]["environment"]["DAGSTER_PG_HOST"] in services


def variables() -> set[str]:
    """Every environment variable that the files set."""
    example = re.findall(r"^(\w+)=", (DEPLOY / "tir.env.example").read_text(encoding="utf-8"), re.MULTILINE)
    of_image = re.findall(
        r"^(?:ENV|\s{4})\s*([A-Z_]+)=", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    of_services = [name for service in COMPOSE["services"].values() for name in service.get("environment", {})]
    return {*example, *of_image, *of_services, *CODE["env"], *STORED["env"]}


def test_every_variable_is_one_that_the_project_or_its_settings_read():
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tir_dagster").rglob("*.py")]
    texts += [(DEPLOY / "dagster.yaml").read_text(encoding="utf-8"), (ROOT / "README.md").read_text(encoding="utf-8")]
    known = set(re.findall(r"\b[A-Z][A-Z0-9_]{3,}\b", "\n".join(texts)))
    # Built from a prefix and the name of a setting.
    known |= {
        name
        for name in variables()
        if name.startswith(("SNOWFLAKE_", "TABLEAU_")) and name.split("_", 1)[1].lower() in "\n".join(texts)
    }
    assert variables() - known - FOREIGN_VARIABLES == set()


def test_no_secret_is_written_into_a_file_and_only_the_code_location_gets_those_of_servers():
    example = (DEPLOY / "tir.env.example").read_text(encoding="utf-8")
    assert re.findall(r"^\w+=.+$", example, re.MULTILINE) == [], "the example has no values"
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            assert not SECRET.search(name) or str(value).startswith("${"), name
    assert [name for name, service in COMPOSE["services"].items() if "env_file" in service] == ["code"]
    assert not any(SECRET.search(name) for name in CODE["env"])
    assert "postgresqlPassword" not in VALUES["postgresql"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "tir.env" in ignored


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(
        r"\\\n\s*", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    ).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def test_the_image_is_built_in_stages_from_pinned_parts_and_does_not_run_as_root():
    parts = instructions()
    assert {name for name, _ in parts} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}
    (base,) = [text for name, text in parts if name == "ARG"]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.1[123]\.\d+-slim-[a-z]+", base)
    stages = [text.split() for name, text in parts if name == "FROM"]
    assert [stage[0] for stage in stages] == ["${PYTHON_IMAGE}"] * 2
    assert [text for name, text in parts if name == "USER"] == [str(CODE["podSecurityContext"]["runAsUser"])]
    after_user = [name for name, _ in parts][[name for name, _ in parts].index("USER") :]
    assert "RUN" not in after_user
    assert not any(SECRET.search(text) for name, text in parts if name in ("ARG", "ENV"))
    runs = [text for name, text in parts if name == "RUN"]
    assert all(
        "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run for run in runs if "apt-get" in run
    )
    assert all("--constraint constraints.txt" in run for run in runs if "pip install" in run)
    for run in runs:
        # Only the syntax: no root and no network here.
        subprocess.run(["sh", "-n", "-c", run], check=True)
    assert json.loads(parts[-1][1])[0] == "tir"
    settings = dict(re.findall(r"(\w+)=(\S+)", " ".join(text for name, text in parts if name == "ENV")))
    assert (settings["TIR_HOME"], settings["TIR_SPECS"]) == (CODE["env"]["TIR_HOME"], CODE["env"]["TIR_SPECS"])


def test_what_the_image_copies_is_in_the_project_and_not_ignored():
    ignored = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
    ]
    assert ignored[0] == "*", "nothing is sent to the builder but what is named"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    copied = []
    for name, text in instructions():
        if name == "COPY" and "--from=" not in text:
            words = [word for word in text.split() if not word.startswith("--")]
            copied += words[:-1]
    assert sorted(copied) == sorted(sent)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_dagsters_settings_are_those_of_the_project_but_for_where_the_history_is(tmp_path, monkeypatch):
    ours = yaml.safe_load(DAGSTER_YAML.read_text(encoding="utf-8"))
    image = yaml.safe_load((DEPLOY / "dagster.yaml").read_text(encoding="utf-8"))
    assert {name: image[name] for name in ours} == ours
    assert image.keys() - ours.keys() == {"storage", "local_artifact_storage", "compute_logs"}
    extra, daemon = VALUES["additionalInstanceConfig"], VALUES["dagsterDaemon"]
    assert {name: ours[name] for name in extra} == extra
    assert (daemon["sensors"]["useThreads"], daemon["sensors"]["numWorkers"]) == (True, ours["sensors"]["num_workers"])
    assert (
        daemon["runMonitoring"]["freeSlotsAfterRunEndSeconds"]
        == ours["run_monitoring"]["free_slots_after_run_end_seconds"]
    )
    # Dagster itself checks the rest; only the database is not there.
    for place in ("local_artifact_storage", "compute_logs"):
        image[place]["config"]["base_dir"] = str(tmp_path / place)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text(
        yaml.safe_dump({**image, "storage": {"sqlite": {"base_dir": str(tmp_path)}}})
    )
    with dg.DagsterInstance.get() as instance:
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 4


def test_pods_mount_what_there_is_and_docs_create_what_they_name():
    assert {mount["name"] for mount in CODE["volumeMounts"]} == {volume["name"] for volume in CODE["volumes"]}
    claim = yaml.safe_load((DEPLOY / "state.yaml").read_text(encoding="utf-8"))
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in CODE["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [claim["metadata"]["name"]]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    created = [
        CODE["envSecrets"][0]["name"],
        VALUES["global"]["postgresqlSecretName"],
        CODE["volumes"][1]["configMap"]["name"],
    ]
    for name in created:
        assert re.search(rf"kubectl create (secret generic|configmap) {name} ", DOCS), f"nothing creates {name}"
    image = COMPOSE["x-tir"]["image"]
    images = {
        f"{part['image']['repository']}:{part['image']['tag']}"
        for part in (CODE, VALUES["dagsterWebserver"], VALUES["dagsterDaemon"])
    }
    assert images == {image}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    (version,) = [pin.split("==")[1] for pin in pins if pin.startswith("dagster==")]
    assert f"--version {version} " in DOCS
    assert f"--version {version} " in (DEPLOY / "values.yaml").read_text(encoding="utf-8")


def test_with_an_object_store_only_the_state_is_elsewhere():
    """Helm replaces the list of deployments, so all of it is there twice."""
    assert set(OBJECT_STORE) == {"dagster-user-deployments"}
    own, stored = dict(CODE), dict(STORED)
    added = stored["env"].items() - own.pop("env").items()
    assert {name for name, _ in added} == {"TIR_STATE", "TIR_STAGING"}
    assert CODE["env"].items() <= stored.pop("env").items()
    (state, *others), (local, *same) = own.pop("volumes"), stored.pop("volumes")
    assert (state["name"], set(local)) == (local["name"], {"name", "emptyDir"})
    assert (own, others) == (stored, same)
    for name, address in added:
        assert StagingPlace.of(address, {}).address == address
        assert name != "TIR_STATE" or S3Store(address, {})
    assert "TIR_STATE" in re.findall(r"^(\w+)=", (DEPLOY / "tir.env.example").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_command_of_the_files_is_one_of_the_readme():
    """Those that people type: what services run is in the files alone."""
    commands = [
        found[1]
        for file in DEPLOY.iterdir()
        for line in file.read_text(encoding="utf-8").splitlines()
        if (found := re.match(r"\s*#.*?((?:docker|helm|kubectl) .*)", line))
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {line.partition("  #")[0].strip() for line in readme.splitlines() if line.startswith("    ")}
    assert len(commands) >= 5
    assert [command for command in commands if command not in shown] == []
    assert [command for command in shown if re.match(r"(docker|helm) ", command) and command not in DOCS] == []


def test_files_that_the_docs_name_are_there_and_each_file_of_deploy_is_named():
    named = set(re.findall(r"\bdeploy/[\w.-]+\w", DOCS + (DEPLOY / "README.md").read_text(encoding="utf-8")))
    assert {str(path.relative_to(ROOT)) for path in DEPLOY.iterdir()} - {"deploy/README.md"} == named


def environment(**more: str) -> dict[str, Any]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **more}


@pytest.mark.long
def test_the_wheel_with_everything_the_image_has_installs_from_the_constraints_and_runs(tmp_path):
    """What the Dockerfile's RUN lines do, in an empty virtual environment: minutes, and a gigabyte on the disk."""
    runs = [text for name, text in instructions() if name == "RUN"]
    venv, install = (run.replace("/opt/tir", str(tmp_path / "tir")) for run in runs[:2])
    python = Path(sys.executable).resolve()
    for line in (venv.replace("python ", f"{python} ", 1), install):
        subprocess.run(["sh", "-c", line], cwd=ROOT, check=True, env=os.environ)
    installed = tmp_path / "tir" / "bin"
    for check in (["tir", "--help"], ["python", "-c", "import dagster_k8s, dagster_postgres, tir_dagster.definitions"]):
        subprocess.run(
            [installed / check[0], *check[1:]], cwd=tmp_path, check=True, env=environment(TIR_HOME=str(tmp_path))
        )


@pytest.mark.long
def test_the_spark_server_of_the_compose_file_runs_tasks_of_a_refresh(tmp_path, monkeypatch):
    port = free_port()
    here = {"15002": str(port), "/var/lib/tir": str(tmp_path)}
    command = [
        re.sub("|".join(here), lambda known: here[known[0]], word) for word in COMPOSE["services"]["spark"]["command"]
    ]
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with running(tmp_path, *command), listening(port):
        rehearse(connect_session(Remote(f"sc://127.0.0.1:{port}")))
