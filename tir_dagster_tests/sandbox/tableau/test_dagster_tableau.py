"""dagster-tableau's workspace on the stand-in: assets of a site's content, and a refresh through them."""

# No deferred annotations: Dagster reads those of an asset's function.
from collections.abc import Iterable
from typing import Any

import dagster as dg
from dagster_tableau import TableauServerWorkspace, load_tableau_asset_specs, tableau_assets
from dagster_tableau.resources import TableauServerClient

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Publisher


class LocalClient(TableauServerClient):
    """The client makes https addresses only, and polls every ten seconds."""

    @property
    def base_url(self) -> str:
        return f"http://{self.server_name}"

    def poll_jobs(self, job_ids: Any, poll_interval: Any = None, poll_timeout: Any = None) -> Any:
        return super().poll_jobs(job_ids, poll_interval=0.1, poll_timeout=poll_timeout)


class LocalWorkspace(TableauServerWorkspace):
    def build_client(self) -> None:
        names = ("connected_app_client_id", "connected_app_secret_id", "connected_app_secret_value")
        known = (*names, "username", "site_name", "server_name")
        self._client = LocalClient(**{name: getattr(self, name) for name in known})


def workspace(sandbox: Sandbox, site: str) -> LocalWorkspace:
    identity = sandbox.identity
    return LocalWorkspace(
        connected_app_client_id=identity.connected_app_client_id,
        connected_app_secret_id=identity.connected_app_secret_id,
        connected_app_secret_value=identity.connected_app_secret_value,
        username=identity.tableau_user,
        site_name=site,
        server_name=sandbox.tableau_url.removeprefix("http://"),
    )


def names(keys: Iterable[dg.AssetKey]) -> set[str]:
    return {key.to_user_string() for key in keys}


def test_a_site_without_content_has_no_assets(sandbox: Sandbox) -> None:
    with sandbox.tableau(site="other") as server:
        assert not server.datasources.all()
    assert load_tableau_asset_specs(workspace(sandbox, "other")) == []


def test_its_assets_are_the_content_of_a_workbook_and_refresh_its_datasource(
    sandbox: Sandbox, admin: Admin, publisher: Publisher, orders: Any, workbook: Any
) -> None:
    tableau = workspace(sandbox, sandbox.identity.site)

    # Other tests publish to the same site.
    def ours(book: Any) -> bool:
        return book.id == workbook.id

    specs = load_tableau_asset_specs(tableau, workbook_selector_fn=ours)
    visible = {"sales_book/sheet/by_month", "sales_book/sheet/own_tables", "sales_book/dashboard/overview"}
    assert names(spec.key for spec in specs) == {"orders", "sales_book/embedded_datasource/live", *visible}
    # The dashboard shows a hidden sheet, too: there it depends on the datasource itself.
    (overview,) = (spec for spec in specs if spec.key.path[-1] == "overview")
    assert {dep.asset_key.path[-1] for dep in overview.deps} == {"orders", "by_month"}

    @tableau_assets(workspace=tableau, workbook_selector_fn=ours)
    def refreshed(context: dg.AssetExecutionContext, tableau: LocalWorkspace) -> Any:
        yield from tableau.refresh_and_poll(context=context)

    admin.forget_calls()
    result = dg.materialize([refreshed], resources={"tableau": tableau})
    (event,) = result.asset_materializations_for_node("refreshed")
    assert (event.asset_key.path[-1], event.metadata["id"].value) == ("orders", orders.id)
    observed = [entry.asset_observation_data.asset_observation for entry in result.get_asset_observation_events()]
    assert names(item.asset_key for item in observed) == visible
    assert {item.metadata["workbook_id"].value for item in observed} == {workbook.id}
    assert [call["status"] for call in admin.calls() if call["route"] == "refresh"] == [202]
