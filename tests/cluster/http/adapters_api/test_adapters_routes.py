"""Loading, listing and unloading adapters over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from live_app import serving

from quire.cluster.http.adapters_api.adapters_routes import add_routes
from quire.cluster.http.http_answers import ModelList

ADAPTERS = "/v1/adapters"


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with serving(service, apis=[add_routes]) as client:
        yield client


def test_an_adapter_is_listed_with_its_parent_until_it_is_unloaded(http: httpx.Client):
    base = http.get("/v1/models").json()["data"][0]
    assert base["parent"] is None
    loaded = http.post(ADAPTERS, json={"name": "team/legal", "path": "legal"})
    assert loaded.status_code == 200
    card = loaded.json()
    assert card == base | {"id": "team/legal", "parent": base["id"], "created": 1_700_000_000}
    listed = http.get("/v1/models").json()
    assert listed["data"] == [base, card]
    ModelList.model_validate(listed)
    assert http.get("/v1/models/team/legal").json() == card
    gone = http.delete(f"{ADAPTERS}/team/legal")
    assert gone.json() == {"id": "team/legal", "object": "model", "deleted": True}
    assert http.delete(f"{ADAPTERS}/team/legal").status_code == 404
    missing = http.get("/v1/models/team/legal")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"name": "a"}, "path is required"),
        ({"name": 1, "path": "b"}, "name must be a string"),
        ({"name": "a", "path": "b", "pth": "c"}, "pth"),
        (["a"], "the body must be a JSON object"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_field(http: httpx.Client, body, message):
    refused = http.post(ADAPTERS, json=body)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
