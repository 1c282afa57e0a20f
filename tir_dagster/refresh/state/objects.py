"""The object store that several workers share: conditional writes, whole files, the store's own clock. All talk to it is here."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import TirError
from tir_dagster.retries import Backoff, Repeat, RetryPolicy
from tir_dagster.s3 import s3_client, s3_endpoint, s3_problem, s3_region
from tir_dagster.trust import S3_CA_VARIABLES, ca_file

T = TypeVar("T")
_PART = 32 << 20
_DELETED_AT_ONCE = 1000
_MISSING, _CONDITION_FAILED = 404, (409, 412)
_LIBRARIES = ("boto3", "botocore", "s3transfer", "urllib3")


class StateStoreError(TirError, OSError):
    """The object store did not do what it was asked; like a disk that fails, it may do it later."""


class ConflictError(Exception):
    """The object is not, or no longer, what the condition of a write says."""


@dataclass(frozen=True)
class StoredObject:
    """A small object: its content, its tag, and how many seconds ago it was written, by the store's clock."""

    body: bytes
    etag: str
    age: float


class ObjectStore(Protocol):
    """What the shared state needs of an object store; keys are below the store's address."""

    address: str

    def get(self, key: str) -> StoredObject | None: ...

    def put(self, key: str, body: bytes, *, etag: str | None) -> str:
        """Replace the object that has this tag, or create it if there is to be none; raise ConflictError otherwise."""

    def size(self, key: str) -> int | None:
        """Return the size of an object; None if there is none."""

    def upload(self, key: str, file: Path) -> None: ...

    def download(self, key: str, file: Path) -> None: ...

    def keys(self, below: str) -> list[str]: ...

    def delete(self, keys: Collection[str]) -> None: ...

    def abort_uploads(self, below: str) -> None:
        """Remove the parts of uploads that were never completed."""


class S3Store:
    """A prefix in a bucket of S3, or of a store that knows its conditional writes."""

    def __init__(self, address: str, env: Mapping[str, str] = os.environ) -> None:
        self.address = checked_address(address)
        parts = urlsplit(self.address)
        self._bucket, self._prefix = parts.netloc, f"{parts.path.strip('/')}/".lstrip("/")
        self._env = env

    @cached_property
    def _s3(self) -> Any:
        s3_endpoint(self._env)
        # Each call is repeated after 5xx, throttling, timeouts and cut connections. A conditional write may have been done
        # by the lost first try: who writes finds that out by the content.
        retries = {"mode": "standard", "total_max_attempts": 5}
        authorities = ca_file(self._env, S3_CA_VARIABLES)
        return s3_client(region=s3_region(self._env), authorities=authorities, read_timeout=20, retries=retries)

    @cached_property
    def _transfer(self) -> Any:
        from boto3.s3.transfer import TransferConfig

        return TransferConfig(multipart_threshold=2 * _PART, multipart_chunksize=_PART, max_concurrency=4)

    def get(self, key: str) -> StoredObject | None:
        # The client repeats a request, but not the reading of an answer that was cut.
        policy = RetryPolicy(tries=3, backoff=Backoff(first_seconds=0.2))
        return policy.run(lambda: self._got(key), may_repeat=_cut_answer)

    def _got(self, key: str) -> StoredObject | None:
        def action() -> StoredObject:
            answer = self._s3.get_object(Bucket=self._bucket, Key=self._prefix + key)
            now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            age = (now - answer["LastModified"]).total_seconds()
            return StoredObject(answer["Body"].read(), answer["ETag"], age)

        return self._unless_missing(key, action)

    def put(self, key: str, body: bytes, *, etag: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        from botocore.exceptions import ClientError

        with self._explaining(key):
            try:
                answer = self._s3.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body, **condition)
            except ClientError as error:
                status = _status(error)
                if status in _CONDITION_FAILED or (status == _MISSING and _code(error) != "NoSuchBucket"):
                    raise ConflictError(key) from error
                raise
        return str(answer["ETag"])

    def size(self, key: str) -> int | None:
        return self._unless_missing(
            key, lambda: int(self._s3.head_object(Bucket=self._bucket, Key=self._prefix + key)["ContentLength"])
        )

    def upload(self, key: str, file: Path) -> None:
        with self._explaining(key):
            self._s3.upload_file(str(file), self._bucket, self._prefix + key, Config=self._transfer)

    def download(self, key: str, file: Path) -> None:
        with self._explaining(key):
            self._s3.download_file(self._bucket, self._prefix + key, str(file), Config=self._transfer)

    def keys(self, below: str) -> list[str]:
        with self._explaining(below):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + below)
            return [entry["Key"].removeprefix(self._prefix) for page in pages for entry in page.get("Contents", ())]

    def delete(self, keys: Collection[str]) -> None:
        entries = [{"Key": self._prefix + key} for key in keys]
        with self._explaining("files"):
            for start in range(0, len(entries), _DELETED_AT_ONCE):
                batch = {"Objects": entries[start : start + _DELETED_AT_ONCE], "Quiet": True}
                answer = self._s3.delete_objects(Bucket=self._bucket, Delete=batch)
                if errors := answer.get("Errors"):
                    raise StateStoreError(
                        f"{self.address}: {len(errors)} objects were not deleted ({errors[0].get('Code')}). The next refresh tries again; "
                        "check that s3:DeleteObject is allowed."
                    )

    def abort_uploads(self, below: str) -> None:
        with self._explaining(below):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + below
            )
            for upload in [entry for page in pages for entry in page.get("Uploads", ())]:
                self._s3.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _unless_missing(self, key: str, action: Callable[[], T]) -> T | None:
        from botocore.exceptions import ClientError

        with self._explaining(key):
            try:
                return action()
            except ClientError as error:
                if _status(error) == _MISSING and _code(error) != "NoSuchBucket":
                    return None
                raise

    @contextmanager
    def _explaining(self, key: str) -> Iterator[None]:
        """Turn the client's errors into ones that say what to do."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _LIBRARIES:
                raise
            message = " ".join(str(error).split())[:300]
            problem = s3_problem(error, bucket_named_in="TIR_STATE") or (
                f"the store did not answer as it should, also when asked again: {message}. Nothing is lost; check the store and the "
                "network, then run again."
            )
            raise StateStoreError(f"The shared state in {self.address} ({key}): {problem}") from error


def checked_address(address: str) -> str:
    """Return the address without a final slash; raise if it is not one of S3, or contains credentials."""
    parts = urlsplit(address)
    if parts.scheme != "s3" or not parts.netloc or has_credentials(address) or parts.query or parts.fragment:
        raise TirError(
            "TIR_STATE (the field `address` of the resource `state`) is no address of shared state, or carries a user or a password. "
            "Set it to something like s3://bucket/prefix, and the credentials as AWS documents it; or unset it for a local folder."
        )
    return address.rstrip("/")


def _cut_answer(error: Exception) -> Repeat | None:
    cause = error.__cause__
    names = ("ResponseStreamingError", "IncompleteReadError", "ReadTimeoutError")
    return Repeat(str(error)) if isinstance(error, StateStoreError) and type(cause).__name__ in names else None


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
