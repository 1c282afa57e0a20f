"""`tir demo`: a change and its refresh on the sandbox, told step by step, and compared with the source."""
