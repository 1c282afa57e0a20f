"""A small workbook of the tests, as Tableau Desktop shapes one that uses a published datasource."""

from __future__ import annotations

import zipfile
from pathlib import Path

# Two sheets on a published datasource, one of them hidden, a dashboard with both, and a sheet on tables of its own.
_DOCUMENT = """<?xml version='1.0' encoding='utf-8' ?>
<workbook source-build='2025.3.0' version='18.1'>
  <datasources>
    <datasource hasconnection='false' inline='true' name='Parameters' version='18.1' />
    <datasource caption='Orders' inline='true' name='sqlproxy.1' version='18.1'>
      <repository-location id='{published}' path='/t/sandbox/datasources' revision='1.0' site='sandbox' />
      <connection channel='http' class='sqlproxy' dbname='{published}' directory='dataserver' port='80' server='localhost' username=''>
        <relation name='sqlproxy' table='[sqlproxy]' type='table' />
      </connection>
    </datasource>
    <datasource caption='Live' inline='true' name='federated.2' version='18.1'>
      <connection class='federated'>
        <named-connections>
          <named-connection caption='x' name='snowflake.x'>
            <connection class='snowflake' dbname='D' schema='S' server='sandbox.snowflakecomputing.com' username='U' />
          </named-connection>
        </named-connections>
        <relation connection='snowflake.x' name='T' table='[S].[T]' type='table' />
      </connection>
    </datasource>
  </datasources>
  <worksheets>
    <worksheet name='By month'>
      <table><view><datasources><datasource caption='Orders' name='sqlproxy.1' /></datasources></view></table>
    </worksheet>
    <worksheet name='Details'>
      <table><view><datasources><datasource caption='Orders' name='sqlproxy.1' /></datasources></view></table>
    </worksheet>
    <worksheet name='Own tables'>
      <table><view><datasources><datasource caption='Live' name='federated.2' /></datasources></view></table>
    </worksheet>
  </worksheets>
  <dashboards>
    <dashboard name='Overview'>
      <zones>
        <zone h='100000' id='1' w='100000' x='0' y='0'>
          <zone h='50000' id='2' name='By month' w='100000' x='0' y='0' />
          <zone h='50000' id='3' name='Details' w='100000' x='0' y='50000' />
          <zone h='1000' id='4' type-v2='text' w='1000' x='0' y='0' />
        </zone>
      </zones>
    </dashboard>
  </dashboards>
  <windows>
    <window class='worksheet' name='By month' />
    <window class='worksheet' hidden='true' name='Details' />
    <window class='worksheet' name='Own tables' />
    <window class='dashboard' name='Overview' />
  </windows>
</workbook>
"""


def write_workbook(path: Path, published: str, *, packed: dict[str, bytes] | None = None) -> Path:
    """Write a .twb that uses the datasource of this content URL, or a .twbx with these further members."""
    text = _DOCUMENT.format(published=published)
    if path.suffix == ".twb":
        path.write_text(text, encoding="utf-8")
        return path
    with zipfile.ZipFile(path, "w") as package:
        package.writestr(f"{path.stem}.twb", text)
        for name, data in (packed or {}).items():
            package.writestr(name, data)
    return path
