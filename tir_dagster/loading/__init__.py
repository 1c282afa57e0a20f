"""Files into Snowflake: what landed is checked and staged by Spark's tasks, and committed once by the driver.

What a load promises, and how.

The transaction. Each task reads a file or a part of one, checks every row and PUTs good and bad rows as Parquet into a
folder of its own load in an internal stage. The driver COPYs that folder into temporary tables of its session: so far
nothing that anybody else reads has changed. Then one transaction claims the files in the ledger, changes the table, adds
the rejected rows and says which keys changed. DDL would commit it half way: all tables are there before it begins.

Loading twice. The ledger (TIR_LOADED_FILES) knows each file by its path and its content: the ETag of an S3 object, the MD5
of a local file. The same content again under the same path is noted as REPEATED and changes nothing. Another content
under the same path is loaded again. The same content under another path is another file: a switch that went on, off and
on again is described by equal files, too. A claim is a MERGE on (load, path, how often the path was loaded), and only
rows of claimed files go into the table: of two loads at once, one loads the file and the other stops.

Order. Files go by name, or by the time of their last change; rows in a file by line. Where the spec names `order_by`, that
column decides first, also against what is in the table: a late file does not undo a newer version. For that, deleted keys
are remembered with their version (TIR_DELETED_…). Without `order_by` the later file wins.

Bad rows are rejected one by one, with file, line and reason, into TIR_REJECTED_ROWS, in the same transaction; if their share
is above `reject_share`, the load stops before it. A file that cannot be read stops the load.

Which keys changed is read in the transaction, by comparing with the table, and kept with the load (TIR_LOADS): a process that
dies after the commit has not lost what it had to report.
"""
