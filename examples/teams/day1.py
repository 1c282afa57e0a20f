"""Put a file of orders into the landing bucket, and make the teams' projects on Tableau Server."""

from __future__ import annotations

import os
from datetime import date, timedelta

import boto3
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

orders = (f"{n},{date(2026, 1, 1) + timedelta(days=n % 180)},{10 + n % 500},2026-06-30 12:00:00" for n in range(5000))
content = "\n".join(["ORDER_ID,ORDER_DATE,AMOUNT,UPDATED_AT", *orders])
boto3.client("s3").put_object(Bucket="landing", Key="company/orders/day1.csv", Body=content.encode())

server = TSC.Server(os.environ["TABLEAU_SERVER_URL"], use_server_version=True)
token = TSC.PersonalAccessTokenAuth(
    os.environ["TABLEAU_TOKEN_NAME"], os.environ["TABLEAU_TOKEN_SECRET"], os.environ["TABLEAU_SITE"]
)
with server.auth.sign_in(token):
    there = {project.name for project in TSC.Pager(server.projects)}
    for name in {"Sales", "Finance"} - there:
        server.projects.create(TSC.ProjectItem(name))
print("5,000 orders are in s3://landing/company/orders; the projects Sales and Finance are there")
