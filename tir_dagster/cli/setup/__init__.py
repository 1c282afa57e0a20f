"""`tir init`, `tir adopt`, `tir doctor`: a first spec from what the servers show, and what is missing on the way."""
