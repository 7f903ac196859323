"""Where files lie: a local path, or a URL of an object store that fsspec knows, such as s3://bucket/prefix.

Both are used as pathlib's paths are. Endpoint and credentials are those of fsspec's own configuration and of AWS's
environment variables (AWS_ENDPOINT_URL, AWS_PROFILE, ...), never part of a URL or of a recipe.

On an object store a write is atomic by itself, and there are no folders; what has to be taken by one run only is
created with a condition (S3's `If-None-Match: *`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from upath import UPath

from gradmm_core.errors import InputError

#: For fsspec: other machines write to the store too, so an older listing says nothing of what is there now.
FRESH_LISTINGS: dict[str, Any] = {"use_listings_cache": False}


def location(place: str | Path | UPath) -> Path | UPath:
    """A `Path` for what is local, with `~` spelt out, a `UPath` for a URL. Nothing is opened or looked at.

    Raises:
        ValueError: for the home of a user that there is not; for a URL of a kind that fsspec does not know, or
            that cannot be written, or with more in it than a place: what is not the place's name would end up in
            records and pages.
    """
    if isinstance(place, UPath) and not isinstance(place, Path):
        return place
    kind, is_url, rest = str(place).partition("://")
    if not is_url:
        local = os.path.expanduser(str(place))  # pathlib's own raises what nobody expects
        if local.startswith("~") and isinstance(place, str):  # `./~a` is `~a` as a path
            raise ValueError("there is no such user")
        return Path(local)
    if kind in ("http", "https"):
        raise ValueError("the web takes no files")
    if any(character in rest for character in "*?[]#") or "@" in rest.partition("/")[0]:
        raise ValueError("it may name a bucket and a prefix, but no pattern, option or password")
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
    """Tells in one line what a store says. What is missing, or there already, is the caller's to judge.

    Raises:
        InputError: if the store cannot be reached, refuses, or needs a package that is not installed.
    """
    try:
        yield
    except (InputError, FileExistsError):
        raise
    except ImportError as error:
        package = "'gradmm[s3]'" if place.protocol in ("s3", "s3a") else "the package that it names"
        raise InputError(f"what reads it is not installed ({error})", str(place), f"install {package}") from error
    except Exception as error:  # each store's client has errors of its own, not all of them OSErrors
        if isinstance(error, FileNotFoundError) and not _lacks_bucket(error):
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"cannot be used ({what})", str(place), "check the bucket's name, your credentials and the endpoint"
        ) from error


def reach(place: Location) -> None:
    """Proves that the store behind a URL answers; of a local path there is nothing to prove.

    Raises:
        InputError: if it does not.
    """
    if isinstance(place, Path):
        return
    objects_in(place)


def objects_in(place: UPath) -> list[str]:
    """The names, as fsspec has them, of what lies directly under a prefix; none if nothing does."""
    with storage_errors(place):
        try:
            return sorted(place.fs.ls(place.path, detail=False))
        except FileNotFoundError as error:
            if _lacks_bucket(error):
                raise
            return []


def _lacks_bucket(error: FileNotFoundError) -> bool:
    """Whether it is not the object that is missing, but all that it would lie in."""
    response = getattr(error.__cause__, "response", None)  # S3's own answer
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NoSuchBucket"


def read_bytes(place: Location) -> bytes:
    """A file's content; that of an object is downloaded.

    Raises:
        FileNotFoundError: if it is not there.
    """
    if isinstance(place, Path):
        return place.read_bytes()
    with storage_errors(place):
        content: Any = place.fs.cat_file(place.path)
    return content


def put(place: UPath, content: bytes) -> None:
    """Writes an object, whole or not at all."""
    with storage_errors(place):
        place.fs.pipe_file(place.path, content)


def create(place: UPath, content: bytes) -> None:
    """Writes an object that is not there yet: of all that try at once, one succeeds.

    Two that write the same bytes are taken for one, so what is to belong to one run has to be that run's alone.

    Raises:
        FileExistsError: if it is there, with other content.
    """
    with storage_errors(place):
        try:
            place.fs.pipe_file(place.path, content, mode="create")
        except OSError as error:
            # Stores name this refusal differently. And if the answer to a first request was lost, it is the
            # client's second one that is refused, on account of what the first has written.
            try:
                there = place.fs.cat_file(place.path)
            except FileNotFoundError:
                raise error from error.__cause__
            if there != content:
                raise FileExistsError(str(place)) from error


def prove_exclusive(place: UPath) -> None:
    """Proves, on an object that may be overwritten, that a store takes writes and heeds their condition.

    Raises:
        InputError: if it does not. Two runs could then take one id, or leave each other's release uncounted.
    """
    put(place, b"written")
    try:
        create(place, b"overwritten")
    except FileExistsError:
        return
    raise InputError(
        "this store overwrites what it was told not to (it ignores `If-None-Match: *`)",
        str(place.parent),
        "choose one with conditional writes, or a local folder",
    )
