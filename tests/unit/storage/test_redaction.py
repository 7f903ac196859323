"""Errors after `redact_errors`: nothing that may come from a record, and the full error in a file."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from gradmm.errors import InputError, RedactedError, printable
from gradmm.storage.redaction import redact_errors

SECRET = "a secret text\udc80"


def raised_from(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise error from cause

    return work


def logged(error: BaseException) -> str:
    """Format an error with its traceback and those of its causes."""
    record = logging.LogRecord(
        "a", logging.ERROR, "a", 1, "%r", (error,), (type(error), error, error.__traceback__)
    )
    return logging.Formatter().format(record)


def test_a_result_is_returned_unchanged(tmp_path: Path) -> None:
    assert redact_errors(lambda: 3, "stage", tmp_path / "errors") == 3
    assert not list(tmp_path.iterdir())


def test_an_error_shows_its_type_and_line_and_the_rest_is_in_a_private_file(tmp_path: Path) -> None:
    with pytest.raises(RedactedError) as caught:
        redact_errors(raised_from(ValueError(f"no {SECRET}")), "stage", tmp_path / "errors")
    (file,) = (tmp_path / "errors").iterdir()
    assert str(caught.value).startswith("stage: ValueError in tests.unit.storage.test_redaction.work, line ")
    assert str(caught.value).endswith(
        f"its message may quote private records and is in {file}, readable by its owner only"
    )
    assert "secret" not in logged(caught.value)
    assert caught.value.__context__ is None
    assert "ValueError: no a secret text\\udc80" in file.read_text()
    assert "KeyError" in file.read_text()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_message_is_lost_if_the_root_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("a file where the folder would be")
    with pytest.raises(RedactedError, match="is lost because the root cannot be written"):
        redact_errors(raised_from(ValueError(SECRET)), "stage", tmp_path / "errors")


@pytest.mark.parametrize(
    "error",
    [
        InputError("row 3 has no text", "train", "remove it"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file"),
    ],
)
def test_input_and_system_errors_pass_without_their_cause(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        redact_errors(raised_from(error), "stage", tmp_path / "errors")
    assert caught.value is error
    assert "secret" not in logged(error)


def test_an_os_error_with_a_library_message_is_redacted(tmp_path: Path) -> None:
    for error in (OSError(errno.EINVAL, SECRET), OSError(SECRET)):
        with pytest.raises(RedactedError, match="OSError in"):
            redact_errors(raised_from(error), "stage", tmp_path / "errors")


def test_a_redacted_error_is_not_redacted_again(tmp_path: Path) -> None:
    def inner() -> None:
        redact_errors(raised_from(ValueError(SECRET)), "inner", tmp_path / "errors")

    with pytest.raises(RedactedError, match=r"^inner: "):
        redact_errors(inner, "outer", tmp_path / "errors")


def test_an_input_error_is_one_printable_line() -> None:
    error = InputError("the key 'a\nb' \x1b[2J", "\u202efile\u200b", "é ist 好")
    assert str(error) == "\\u202efile\\u200b: the key 'a\\nb' \\x1b[2J; é ist 好"
    assert printable("\ud800") == "\\ud800"
