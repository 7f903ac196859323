"""Upload of a release folder to the Hugging Face hub, as a data set.

The bytes of `RELEASE_FILES` are read once and checked before the first request, so a file that is added to the
folder later is not sent. The endpoint and the token are huggingface_hub's own (HF_ENDPOINT, HF_TOKEN,
`hf auth login`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import BaseModel, PositiveFloat, ValidationError

from gradmm.errors import InputError
from gradmm.outputs.release import RELEASE_FILES, check_release
from gradmm.storage.location import Location, reach, read_bytes

COMMIT_MESSAGE = "Release synthetic texts"

#: Characters of the hub's error message that are shown.
MAX_ERROR_LENGTH = 300


class _Promise(BaseModel, strict=True, allow_inf_nan=False):
    """The fields of privacy.json that decide whether a release may be published, in every version of gradmm."""

    epsilon: PositiveFloat | None
    safe: bool


def publish_release(release: Location, repo_id: str, private: bool = True, without_guarantee: bool = False) -> str:
    """Upload a release folder in one commit, and create the data set `repo_id` if it does not exist.

    The visibility of an existing repository must match `private` and is never changed. Its other files stay.

    Args:
        release: a run's release folder.
        repo_id: "owner/name".
        without_guarantee: publish a release that was made without noise. Seeded noise is never published.

    Returns:
        The data set's URL.

    Raises:
        InputError: if the folder is not a release folder, or has no guarantee (nothing is sent in these cases); if
            the repository has the other visibility; if the hub refuses or cannot be reached.
    """
    contents = release_contents(release)
    check_promise(contents["privacy.json"], str(release / "privacy.json"), without_guarantee)
    _check_repo_id(repo_id)
    with _hub_errors(repo_id):  # a token that is about to expire is renewed
        token = get_token()
    if token is None:
        raise InputError(
            "no token for the hub", "HF_TOKEN", "set it to a token that may write, or run `hf auth login`"
        )

    api = HfApi(token=token)
    with _hub_errors(repo_id, token):
        url = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        is_private = api.dataset_info(repo_id).private
    if is_private is not private:
        names = {True: "private", False: "public", None: "of unknown visibility"}
        raise InputError(
            f"this repository is {names[is_private]}, not {names[private]}",
            repo_id,
            f"change that on the hub, ask for a {names[not private]} one, or choose another name",
        )
    additions = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
    with _hub_errors(repo_id, token):
        api.create_commit(repo_id, additions, commit_message=COMMIT_MESSAGE, repo_type="dataset")
    return str(url)


def release_contents(release: Location) -> dict[str, bytes]:
    """Read the files of a release folder once.

    Raises:
        InputError: if it holds other files, or not all.
    """
    reach(release)
    try:
        check_release(release)
    except ValueError as error:
        raise InputError(str(error), str(release), "give the unchanged folder `release` of a run") from error
    return {name: read_bytes(release / name) for name in RELEASE_FILES}


def check_promise(privacy_json: bytes, where: str, without_guarantee: bool) -> None:
    """Check that a release has a guarantee, or that it may do without one.

    Raises:
        InputError: if it has none, or if its noise was drawn from a seed.
    """
    try:
        promise = _Promise.model_validate_json(privacy_json)
    except ValidationError as error:
        raise InputError("not a valid guarantee", where, "publish the folder as the run wrote it") from error
    if promise.epsilon is None:  # no noise; `safe` is false too
        if not without_guarantee:
            raise InputError(
                "this release has no epsilon, hence no privacy guarantee",
                where,
                "set privacy.epsilon and run again; or allow it (without-guarantee), if the data are public",
            )
    elif not promise.safe:
        raise InputError(
            "the noise of this release was drawn from a seed and can be removed",
            where,
            "run again without privacy.unsafe_noise_seed; there is no override",
        )


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError("not a valid repository name", repr(repo_id), "give owner/name") from error
    if "/" not in repo_id:  # the hub would create it under the token's owner, and the commit would not find it
        raise InputError("the repository name has no owner", repr(repo_id), "give owner/name")


@contextmanager
def _hub_errors(repo_id: str, token: str | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub, the HTTP client and the large-file storage share no base class
        # `from None`: the HTTP client's error may quote a header with the token.
        raise InputError(
            f"the hub refuses or cannot be reached ({_without_token(_hub_answer(error), token)})",
            repo_id,
            "check the name, the network and that your token (HF_TOKEN or `hf auth login`) may write there",
        ) from None


def _hub_answer(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"{error.response.status_code} {error.server_message or error.response.reason_phrase}"
    return f"{type(error).__name__}: {error}"


def _without_token(answer: str, token: str | None) -> str:
    """Return the answer on one line, without the token. An escaped token is found by the scheme before it."""
    hidden = re.sub(r"Bearer \S+", "[token]", answer.replace(token, "[token]") if token else answer)
    return textwrap.shorten(hidden, MAX_ERROR_LENGTH, placeholder=" ...")
