"""The REST calls: one module per part of the API, each a set of handlers that turn a call into an answer."""
