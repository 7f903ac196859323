from __future__ import annotations

import socket
from collections.abc import Iterator
from unittest import mock

import pytest
from huggingface_hub import constants

from gradmm.config.settings import DataSettings, ModelSettings
from gradmm.data.splits import load_splits
from gradmm.errors import InputError
from gradmm.lm.model_reference import resolve_model
from gradmm.storage import hub


@pytest.fixture(params=["silent", "absent"])
def unreachable_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that accepts connections and never answers, or one that refuses them. Any retry is an error."""
    with socket.socket() as server, mock.patch("huggingface_hub.utils._http.time") as clock:
        server.bind(("127.0.0.1", 0))
        if request.param == "silent":
            server.listen()
        clock.sleep.side_effect = AssertionError("a file was tried again")
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
        hub._hub_answers.cache_clear()
        yield
    hub._hub_answers.cache_clear()


@pytest.mark.usefixtures("unreachable_hub")
def test_a_hub_out_of_reach_is_reported_without_retries() -> None:
    with pytest.raises(InputError, match=r"some/absent-model.*check the network"):
        resolve_model(ModelSettings(name="some/absent-model"))
    with pytest.raises(InputError, match=r"some/absent-data.*check the names and the network"):
        load_splits(DataSettings(hub="some/absent-data"), [0, 1], 0)


@pytest.mark.usefixtures("unreachable_hub")
def test_the_library_is_as_before_afterwards() -> None:
    with hub.hub_or_its_cache():
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()
