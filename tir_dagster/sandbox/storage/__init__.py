"""The S3 stand-in: moto's server, with the bucket `landing` in it."""
