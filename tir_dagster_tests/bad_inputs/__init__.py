"""A hundred and more bad inputs: what was done, what the user reads, what is unchanged. docs/bad-inputs.md is written from them."""
