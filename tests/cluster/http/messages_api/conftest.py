"""A client of the Messages API over a service with scripted output."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from live_app import serving
from messages_reader import PLAIN

from quire.cluster.http.messages_api.messages_routes import add_routes


@pytest.fixture
def client(service) -> Iterator[httpx.Client]:
    service.script = PLAIN
    with serving(service, apis=[add_routes]) as client:
        yield client
