"""Loads of files into Snowflake: Spark's tasks check and stage the files, and the driver commits them once.

What a load guarantees is in docs/loading.md. How it does so:

- Tasks PUT rows into a stage, the driver COPYs them into temporary tables, and only then one transaction claims the files,
  changes the table, and records rejected rows and changed keys. DDL would commit it too early, so all tables exist before.
- A claim is a MERGE on (table, path, how often the path was loaded), and only rows of claimed files go into the table: of two
  loads at once, one loads the file and the other stops. The claim's lock on the ledger makes loads commit one after the other.
- Other writers of the table take no such lock: the planned changes are compared with those made, and repeated if they differ.
- Changed keys are kept with the load: the report of a process that died after its commit is made by the next look.
"""
