"""File locations: a local path, or the URL of an object store supported by fsspec, such as s3://bucket/prefix.

Both offer the interface of `pathlib.Path`. Endpoint and credentials come from fsspec's configuration and AWS's
environment variables (AWS_ENDPOINT_URL, AWS_PROFILE, ...), never from a URL or a recipe.

Object stores write atomically and have no folders. To reserve a name for a single run, create the object with a
condition (S3's `If-None-Match: *`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from upath import UPath

from gradmm.errors import InputError

#: For fsspec. Other machines write to the store too, so a cached listing may be stale.
FRESH_LISTINGS: dict[str, Any] = {"use_listings_cache": False}


#: A URL with one slash too few, which would be a folder with a strange name.
SLIP = re.compile("(?P<kind>s3a?|gs|gcs|abfss?|az|file|memory):/(?P<rest>.*)")


def location(place: object) -> Path | UPath:
    """Return a `Path` for a local path, with `~` expanded, or a `UPath` for a URL. Access nothing.

    Raises:
        ValueError: for the home of an unknown user, and for a URL that lacks a slash or whose protocol is unknown
            or read-only. Also for a URL with patterns, options or credentials, which would end up in records and
            pages, and for what is neither text nor a path.
    """
    if isinstance(place, UPath) and not isinstance(place, Path):
        return place
    if not isinstance(place, str | Path):  # settings may hold anything, and `str(None)` would be a folder
        raise ValueError(f"{place!r} is no path")
    kind, is_url, rest = str(place).partition("://")
    if not is_url:
        if isinstance(place, str) and (slip := SLIP.fullmatch(place)):
            raise ValueError(f"did you mean {slip['kind']}://{slip['rest']}?")
        local = os.path.expanduser(str(place))  # Path.expanduser raises RuntimeError
        if local.startswith("~") and isinstance(place, str):  # `Path('./~a')` is `~a`
            raise ValueError("no such user")
        return Path(local)
    if kind in ("http", "https"):
        raise ValueError("http(s) is read-only")
    if any(character in rest for character in "*?[]#") or "@" in rest.partition("/")[0]:
        raise ValueError("only a bucket and a prefix are allowed, not patterns, options or passwords")
    of_url = UPath(place, protocol=kind, **FRESH_LISTINGS)
    return Path(of_url.path) if kind in ("file", "local") else of_url


Location = Annotated[
    Path | UPath,
    PlainValidator(location),
    PlainSerializer(str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "path"}),
]


@contextmanager
def storage_errors(place: UPath) -> Iterator[None]:
    """Report errors of a store in one line. Pass on FileNotFoundError and FileExistsError for objects.

    Raises:
        InputError: if the store is unreachable, refuses access, or needs a package that is not installed.
    """
    try:
        yield
    except (InputError, FileExistsError):
        raise
    except ImportError as error:
        package = "'gradmm[s3]'" if place.protocol in ("s3", "s3a") else "that package"
        raise InputError(f"a package is not installed ({error})", str(place), f"install {package}") from error
    except Exception as error:  # each client raises its own types, not only OSError
        if isinstance(error, FileNotFoundError) and not _lacks_bucket(error):
            raise
        problem = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"cannot be used ({problem})", str(place), "check the bucket's name, your credentials and the endpoint"
        ) from error


def reach(place: Location) -> None:
    """Check that the store behind a URL responds, and that a local path is no file. It need not exist.

    Raises:
        InputError: if the store does not respond, or the path is a file.
    """
    if not isinstance(place, Path):
        objects_in(place)
    elif place.is_file():
        raise InputError("is a file", str(place), "give a folder")


def objects_in(place: UPath) -> list[str]:
    """List the fsspec names of the objects directly under a prefix."""
    with storage_errors(place):
        try:
            return sorted(place.fs.ls(place.path, detail=False))
        except FileNotFoundError as error:
            if _lacks_bucket(error):
                raise
            return []


def _lacks_bucket(error: FileNotFoundError) -> bool:
    """Return whether the bucket is missing, rather than the object."""
    response = getattr(error.__cause__, "response", None)  # S3's own answer
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NoSuchBucket"


def read_bytes(place: Location) -> bytes:
    """Read a file, or download an object.

    Raises:
        FileNotFoundError: if it does not exist.
    """
    if isinstance(place, Path):
        return place.read_bytes()
    with storage_errors(place):
        content: Any = place.fs.cat_file(place.path)
    return content


def put(place: UPath, content: bytes) -> None:
    """Write an object atomically."""
    with storage_errors(place):
        place.fs.pipe_file(place.path, content)


def create(place: UPath, content: bytes) -> None:
    """Write an object that does not exist yet. Only one of several concurrent writers succeeds.

    Writers of identical bytes all succeed, so the content must be unique to a run to reserve a name for it.

    Raises:
        FileExistsError: if it exists with other content.
    """
    with storage_errors(place):
        try:
            place.fs.pipe_file(place.path, content, mode="create")
        except OSError as error:
            # Stores raise different errors for this. And if the response to a first request is lost, the client's
            # retry fails because the first one succeeded.
            try:
                existing = place.fs.cat_file(place.path)
            except FileNotFoundError:
                raise error from error.__cause__
            if existing != content:
                raise FileExistsError(str(place)) from error


def prove_exclusive(place: UPath) -> None:
    """Check that a store accepts writes and honours conditional ones, on an object that may be overwritten.

    Raises:
        InputError: if it does not. Two runs could then share an id, or a release could be missing from the ledger.
    """
    put(place, b"written")
    try:
        create(place, b"overwritten")
    except FileExistsError:
        return
    raise InputError(
        "this store does not support conditional writes (it ignores `If-None-Match: *`)",
        str(place.parent),
        "choose another store or a local folder",
    )
