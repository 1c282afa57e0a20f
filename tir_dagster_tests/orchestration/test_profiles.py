"""`tir refresh --profile` and the profile in Dagster's history."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
from click.testing import CliRunner

from tir_dagster.cli.main import tir
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.sandbox import sample

# Without `spark`: none starts for so few rows.
STAGES = ["lease", "look", "survey", "detect", "shell", "apply", "verify", "publish", "rest"]
CHANGE = sample.Mix(inserts=20, updates=15, moves=5, deletes=10)


def refresh(place, *options: str):
    specs = place.folder / "profiled.yaml"
    specs.write_text(place.spec_text, encoding="utf-8")
    done = CliRunner().invoke(tir, ["--specs", str(specs), "refresh", "orders", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def by_stage(profile: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {stage["stage"]: stage for stage in profile}


def profile_of(asset: str) -> dict[str, dict[str, Any]]:
    with dagster_instance() as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey(["orders", asset]))
    assert event is not None
    assert event.asset_materialization is not None
    return by_stage(event.asset_materialization.metadata["tir/profile"].value)


def test_json_tells_every_stage_with_what_it_moved_and_waited_for(place):
    outcome = json.loads(refresh(place, "--full", "--json").stdout)
    rows = sum(place.source_rows().values())
    profile = by_stage(outcome["profile"])
    assert list(profile) == STAGES
    assert {frozenset(entry) for entry in outcome["profile"]} == {
        frozenset({"stage", "seconds", "rows", "bytes", "waited_for"})
    }
    assert outcome["stages"].keys() - {"publish_server"} == profile.keys() - {"lease", "rest"}
    assert (profile["detect"]["rows"], profile["publish"]["rows"]) == (rows, rows)
    assert profile["apply"]["rows"] == outcome["rows_purged"] + rows
    assert all(profile[stage]["bytes"] > 0 for stage in ("detect", "apply", "publish"))
    waits = {stage: entry["waited_for"].keys() for stage, entry in profile.items()}
    assert waits["look"] == {"Tableau"}
    assert {"warehouse", "quiet period"} <= waits["survey"]
    assert waits["detect"] == {"warehouse"}
    assert waits["apply"] == {"Hyper"}
    assert waits["verify"] == {"Hyper", "warehouse"}
    assert "Tableau" in waits["publish"]
    assert all(sum(entry["waited_for"].values()) <= entry["seconds"] + 0.01 for entry in outcome["profile"])


def test_the_table_for_people_follows_the_result_and_each_asset_shows_its_own_stages(loaded):
    sample.change_table(loaded.sandbox.env, mix=CHANGE, seed=3)
    done = refresh(loaded, "--profile")
    assert done.stdout.startswith("orders: incremental refresh: 30 rows purged, 40 appended")
    lines = done.stderr.splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("stage ")) :]
    assert [line.split()[0] for line in table] == ["stage", *STAGES[:-1], "Dagster"]
    (apply,) = [line for line in table if line.startswith("apply ")]
    assert apply.split()[2] == "70"
    assert list(profile_of("changed_keys")) == ["lease", "look", "survey", "detect"]
    assert list(profile_of("purged_extract")) == ["lease", "look", "shell", "apply", "verify"]
    assert list(profile_of("published_datasource")) == ["lease", "look", "publish"]


def test_a_refresh_with_nothing_to_do_has_a_profile_too(loaded):
    outcome = json.loads(refresh(loaded, "--json", "--profile").stdout)
    assert outcome["decision"] == "none"
    assert [entry["stage"] for entry in outcome["profile"]] == ["lease", "look", "survey", "rest"]
