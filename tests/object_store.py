"""An object store on this machine, for roots that are `s3://` URLs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from upath import UPath

from gradmm.storage.location import location


@contextmanager
def object_store() -> Iterator[None]:
    """Runs a server on the loopback and points AWS's environment variables at it."""
    # Late: the tests with the lowest versions, which need neither, use the other functions.
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    wsgi = server._server
    assert wsgi is not None
    wsgi.app = one_at_a_time(wsgi.app)
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # or it would be asked for credentials
        s3fs.S3FileSystem.clear_instance_cache()
        yield
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def one_at_a_time(app: Callable[..., Any]) -> Callable[..., Any]:
    """A store checks a write's condition and writes in one step; moto, in two."""
    lock = threading.Lock()

    def locked(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with lock:
            return list(app(environ, start_response))

    return locked


def new_bucket(name: str) -> UPath:
    bucket = location(f"s3://{name}")
    assert isinstance(bucket, UPath)
    bucket.fs.mkdir(name)
    return bucket


def objects(root: UPath) -> dict[str, bytes]:
    """All objects under a root by their names from there."""
    store: Any = root.fs
    return {name.removeprefix(root.path).lstrip("/"): store.cat_file(name) for name in store.find(root.path)}
