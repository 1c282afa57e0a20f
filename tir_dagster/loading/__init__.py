"""Loads of files into Snowflake: Spark's tasks check and stage the files, and the driver commits them once.

What a load guarantees, and how.

The transaction. Each task reads a file or a part of one, checks every row and PUTs good and bad rows as Parquet into a
folder of its own load in an internal stage. The driver COPYs that folder into temporary tables of its session: so far
nothing that anybody else reads has changed. Then one transaction claims the files in the ledger, changes the table, adds
the rejected rows and records which keys changed. DDL would commit it too early, so all tables exist before it begins.

Loading twice. The ledger (TIR_LOADED_FILES) knows each file of a table by its path and its content's MD5, whichever load
brought it. The same content again under the same path is recorded as REPEATED and changes nothing. Another content
under the same path is loaded again. The same content under another path is another file: a value that changed and
changed back gives equal files, too. A claim is a MERGE on (table, path, how often the path was loaded), and only
rows of claimed files go into the table: of two loads at once, one loads the file and the other stops. The claim's lock on
the ledger also makes loads commit one after the other. Other writers of the table take no such lock: so the planned
changes are compared with those made, and the transaction is repeated if they differ.

Order. Files go by name, or by the time of their last change; rows in a file by line; no file overtakes one that is not
complete where both may contain the same row. Where the spec names `order_by`, that column decides first, also against what is in
the table: a late file does not undo a newer version. For that, deleted keys are remembered with their version
(TIR_DELETED_…), for the table. Without `order_by` the later file wins.

Bad rows are rejected one by one, with file, line and reason, into TIR_REJECTED_ROWS, in the same transaction; if their share
is above `reject_share`, the load stops before it. A file that cannot be read stops the load.

Which keys changed is read in the transaction, by comparing with the table, and kept with the load (TIR_LOADS): a process that
dies after the commit loses no report: the next look compares the committed loads with the reported ones.
"""
