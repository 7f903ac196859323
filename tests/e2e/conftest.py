"""The server and the small recipe of the flows' tests."""

from tests.flows.conftest import prefect_server as prefect_server
from tests.flows.conftest import tiny_data as tiny_data
from tests.flows.conftest import tiny_recipe as tiny_recipe
