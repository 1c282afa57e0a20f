"""Result batches as the warehouse sends them."""

from __future__ import annotations

import base64

import pyarrow as pa
from snowflake.connector.arrow_context import ArrowConverterContext
from snowflake.connector.result_batch import ArrowResultBatch


def arrow_batch(name: str, values: pa.Array, rows: int | None = None, **meta: str) -> ArrowResultBatch:
    """One column as Snowflake itself would send it, in a batch of the real connector."""
    metadata = {"precision": "38", "scale": "0", "charLength": "0", "byteLength": "0", **meta}
    schema = pa.schema([pa.field(name, values.type, metadata=metadata)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([values], schema=schema))
    data = base64.b64encode(sink.getvalue().to_pybytes()).decode()
    context = ArrowConverterContext({"TIMEZONE": "UTC"})
    return ArrowResultBatch.from_data(
        data, len(values) if rows is None else rows, context, False, False, None, number_to_decimal=True
    )


def arrow_moments(*seconds_and_nanos: tuple[int, int]) -> pa.Array:
    fields = [pa.field("epoch", pa.int64(), nullable=False), pa.field("fraction", pa.int32(), nullable=False)]
    epochs, nanos = zip(*seconds_and_nanos, strict=True)
    return pa.StructArray.from_arrays([pa.array(epochs), pa.array(nanos, pa.int32())], fields=fields)
