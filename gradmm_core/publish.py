"""A run's release folder, published as a data set on the Hugging Face hub. Only when asked to.

What is sent are the bytes of `RELEASE_FILES`, read once and checked before the first request: a file that
appears in the folder later has no way out. The endpoint and the token are huggingface_hub's own (HF_ENDPOINT,
HF_TOKEN, `hf auth login`).
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

from gradmm_core.errors import InputError
from gradmm_core.location import Location, reach, read_bytes
from gradmm_core.release import RELEASE_FILES, check_release

COMMIT_MESSAGE = "Release synthetic texts"

#: Characters of an error of the hub that its one line may take.
LONGEST_ERROR = 300


class _Promise(BaseModel, strict=True, allow_inf_nan=False):
    """What a release of any version says in privacy.json of whether it may be published."""

    epsilon: PositiveFloat | None
    safe: bool


def publish_release(release: Location, repo_id: str, private: bool = True, without_guarantee: bool = False) -> str:
    """Creates the data set `repo_id` if need be and puts the release there, in one commit.

    An existing repository gets a new commit if it is as private, or as public, as was asked for; its other
    files stay. The visibility of a repository is never changed.

    Args:
        release: a run's release folder.
        repo_id: "owner/name".
        without_guarantee: publish a release that was made without noise. Seeded noise is never published.

    Returns:
        The data set's URL.

    Raises:
        InputError: if the folder is no release or makes no promise, or the repository has the other
            visibility, or the hub refuses or cannot be reached. Nothing is sent in the first two cases.
    """
    contents = _release_contents(release)
    _check_promise(contents["privacy.json"], str(release / "privacy.json"), without_guarantee)
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
            f"change that on the hub, {'pass' if private else 'drop'} --public, or choose another name",
        )
    additions = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
    with _hub_errors(repo_id, token):
        api.create_commit(repo_id, additions, commit_message=COMMIT_MESSAGE, repo_type="dataset")
    return str(url)


def _release_contents(release: Location) -> dict[str, bytes]:
    reach(release)
    try:
        check_release(release)
    except ValueError as error:
        raise InputError(
            str(error), str(release), "give the folder `release` of a run, as the run left it"
        ) from error
    return {name: read_bytes(release / name) for name in RELEASE_FILES}


def _check_promise(privacy_json: bytes, where: str, without_guarantee: bool) -> None:
    try:
        promise = _Promise.model_validate_json(privacy_json)
    except ValidationError as error:
        raise InputError("this is no guarantee", where, "publish the folder as the run left it") from error
    if promise.epsilon is None:  # no noise at all; `safe` is false then too
        if not without_guarantee:
            raise InputError(
                "this release has no epsilon, hence no privacy guarantee",
                where,
                "set privacy.epsilon and run again, or pass --without-guarantee if the data are public",
            )
    elif not promise.safe:
        raise InputError(
            "the noise of this release was drawn from a seed, so that it can be taken off again",
            where,
            "run again without privacy.unsafe_noise_seed; nothing overrides this",
        )


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(f"{repo_id!r} is no name of a repository", "--repo", "give owner/name") from error
    if "/" not in repo_id:  # the hub would add the owner, and the commit would look for it without
        raise InputError(f"{repo_id!r} has no owner", "--repo", "give owner/name")


@contextmanager
def _hub_errors(repo_id: str, token: str | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many families: the hub's, the HTTP client's, the large-file storage's
        # `from None`: the HTTP client quotes a header that it cannot send, with the token in it.
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
    """The answer on one line. An escaped token differs from `token`, but follows its scheme."""
    hidden = re.sub(r"Bearer \S+", "[token]", answer.replace(token, "[token]") if token else answer)
    return textwrap.shorten(hidden, LONGEST_ERROR, placeholder=" ...")
