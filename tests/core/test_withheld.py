"""What errors still say after `without_messages`: nothing that could be a record's, and all of it in a file."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from gradmm_core.errors import InputError, WithheldError, printable
from gradmm_core.withheld import without_messages

SECRET = "a secret text\udc80"


def raised_from(error: BaseException) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise error from cause

    return work


def logged(error: BaseException) -> str:
    """With its traceback and those of the errors before it."""
    record = logging.LogRecord(
        "a", logging.ERROR, "a", 1, "%r", (error,), (type(error), error, error.__traceback__)
    )
    return logging.Formatter().format(record)


def test_what_is_returned_is_returned(tmp_path: Path) -> None:
    assert without_messages(lambda: 3, "stage", tmp_path / "errors") == 3
    assert not list(tmp_path.iterdir())


def test_an_error_says_its_kind_and_place_and_the_rest_is_in_a_private_file(tmp_path: Path) -> None:
    with pytest.raises(WithheldError) as caught:
        without_messages(raised_from(ValueError(f"no {SECRET}")), "stage", tmp_path / "errors")
    (file,) = (tmp_path / "errors").iterdir()
    assert str(caught.value).startswith("stage: ValueError in tests.core.test_withheld.work, line ")
    assert str(caught.value).endswith(
        f"its message may quote private records and is in {file}, for its owner only"
    )
    assert "secret" not in logged(caught.value)
    assert caught.value.__context__ is None
    assert "ValueError: no a secret text\\udc80" in file.read_text()
    assert "KeyError" in file.read_text()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_where_nothing_can_be_written_the_message_is_lost(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text("a file where the folder would be")
    with pytest.raises(WithheldError, match="is lost, since the root cannot be written"):
        without_messages(raised_from(ValueError(SECRET)), "stage", tmp_path / "errors")


@pytest.mark.parametrize(
    "error",
    [
        InputError("row 3 has no text", "train", "remove it"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file"),
    ],
)
def test_our_own_errors_and_the_systems_stay_but_for_what_they_came_from(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        without_messages(raised_from(error), "stage", tmp_path / "errors")
    assert caught.value is error
    assert "secret" not in logged(error)


def test_an_os_error_with_words_of_a_librarys_is_none_of_the_systems(tmp_path: Path) -> None:
    for error in (OSError(errno.EINVAL, SECRET), OSError(SECRET)):
        with pytest.raises(WithheldError, match="OSError in"):
            without_messages(raised_from(error), "stage", tmp_path / "errors")


def test_a_message_that_was_withheld_is_not_withheld_again(tmp_path: Path) -> None:
    def inner() -> None:
        without_messages(raised_from(ValueError(SECRET)), "inner", tmp_path / "errors")

    with pytest.raises(WithheldError, match=r"^inner: "):
        without_messages(inner, "outer", tmp_path / "errors")


def test_an_input_error_is_one_printable_line() -> None:
    error = InputError("the key 'a\nb' \x1b[2J", "\u202efile\u200b", "é ist 好")
    assert str(error) == "\\u202efile\\u200b: the key 'a\\nb' \\x1b[2J; é ist 好"
    assert printable("\ud800") == "\\ud800"
