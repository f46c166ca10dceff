"""The S3 server of the tests, with a bucket for each test."""

import itertools
from collections.abc import Iterator

import pytest

from ckptfix.bytes import transfers
from tests.zoo.bucket import Bucket, serving

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Bucket]:
    """Start one server for all tests, and set the environment so that child processes use it for S3 too."""
    pytest.importorskip("moto", reason="moto is the S3 server of these tests: pip install -e '.[test-zoo]'")
    pytest.importorskip("s3fs", reason="pip install 'ckptfix[s3]'")
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore does not retry, so that all retries are ours
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "FSSPEC_S3_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        yield server


@pytest.fixture
def bucket(s3_server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bucket, str]]:
    """Yield the server without planned trouble, and the URL of an empty bucket."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # as above
    monkeypatch.setattr(transfers, "BATCH_PATIENCE", transfers.Patience(attempts=4, first=0.001))
    s3_server.planned.clear()
    s3_server.requests.clear()
    name = f"zoo{next(_numbers)}"
    s3fs.S3FileSystem().mkdir(name)
    yield s3_server, f"s3://{name}"
    s3_server.end_trouble()


@pytest.fixture
def memory() -> Iterator[str]:
    """Yield the URL of an empty folder in memory."""
    import fsspec

    url = f"memory://zoo{next(_numbers)}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True) if fsspec.filesystem("memory").exists(url) else None
