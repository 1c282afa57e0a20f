"""What must not happen: somebody opens the published extract in another tool, "corrects" a number, and publishes it again."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, HyperProcess, Telemetry

name, order, amount = sys.argv[1], int(sys.argv[2]), sys.argv[3]
token = TSC.PersonalAccessTokenAuth(
    os.environ["TABLEAU_TOKEN_NAME"], os.environ["TABLEAU_TOKEN_SECRET"], os.environ.get("TABLEAU_SITE", "")
)
server = TSC.Server(os.environ["TABLEAU_SERVER_URL"], use_server_version=True)
saved = TSC.ConnectionCredentials(os.environ["SNOWFLAKE_USER"], os.environ["SNOWFLAKE_PASSWORD"], embed=True)

with tempfile.TemporaryDirectory() as folder, server.auth.sign_in(token):
    (datasource,) = server.datasources.filter(name=name)
    package = Path(server.datasources.download(datasource.id, filepath=folder))
    with zipfile.ZipFile(package) as archive:
        archive.extractall(Path(folder, "in"))
    (hyper,) = Path(folder, "in").rglob("*.hyper")
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
        Connection(process.endpoint, hyper) as connection,
    ):
        connection.execute_command(
            f'UPDATE "Extract"."Extract" SET "AMOUNT" = {float(amount)} WHERE "ORDER_ID" = {order}'
        )
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(Path(folder, "in").rglob("*")):
            archive.write(file, file.relative_to(Path(folder, "in")))
    item = TSC.DatasourceItem(datasource.project_id, name)
    server.datasources.publish(item, package, "Overwrite", connection_credentials=saved)
print(f"{name} is published with an AMOUNT of {amount} for order {order}")
