"""Credentials of an object store from a block of the Prefect server, for the runs that a command serves."""

from __future__ import annotations

import importlib.util
import os

from gradmm.errors import InputError

#: The variables that decide whose credentials are used.
IDENTITY = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"}


def require_prefect_aws() -> None:
    """Check, before a server is started, that blocks of the type AWS Credentials can be read.

    Raises:
        InputError: if `prefect-aws` is not installed.
    """
    if importlib.util.find_spec("prefect_aws") is None:
        raise InputError("prefect-aws is not installed", "--aws-credentials", "pip install 'gradmm[aws]'")


def use_aws_credentials(block: str) -> None:
    """Set AWS's environment variables, which runs inherit, from a block of the type AWS Credentials.

    If the block has keys or a profile, the environment's own are removed: a key would come before the profile, and
    a session token would be sent with another key. Other variables that the block does not set stay as they are.
    It needs `prefect-aws`.

    Args:
        block: the block's name on the Prefect server in use.

    Raises:
        InputError: if there is no such block.
    """
    from prefect_aws import AwsCredentials

    try:
        stored = AwsCredentials.load(block)
        assert isinstance(stored, AwsCredentials)
    except ValueError as error:  # the message of others quotes what was stored
        problem = "the Prefect server has no block of this name and of the type AWS Credentials"
        fix = "create one in its UI, under Blocks, or leave the option out"
        raise InputError(problem, f"--aws-credentials {block}", fix) from error
    secret = stored.aws_secret_access_key
    variables = {
        "AWS_ACCESS_KEY_ID": stored.aws_access_key_id,
        "AWS_SECRET_ACCESS_KEY": secret and secret.get_secret_value(),
        "AWS_SESSION_TOKEN": stored.aws_session_token,
        "AWS_PROFILE": stored.profile_name,
        "AWS_DEFAULT_REGION": stored.region_name,
        "AWS_ENDPOINT_URL": stored.aws_client_parameters.endpoint_url,
    }
    given = {name: value for name, value in variables.items() if value}
    if not IDENTITY.isdisjoint(given):
        for name in IDENTITY:
            os.environ.pop(name, None)
    os.environ.update(given)
