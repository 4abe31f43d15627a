"""Adapters on the real cluster: loaded and unloaded over HTTP and gRPC, the same on all routers and replicas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "replica"))  # for `adapter_folders`

from adapter_folders import save_adapter
from live import Cluster

from quire.protos import control_pb2, control_pb2_grpc
from quire.replica.builtin_model import CHECKPOINT

pytestmark = pytest.mark.system


@pytest.fixture
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def answer(client: httpx.Client, model: str) -> httpx.Response:
    body = {"prompt": "A quire is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json={**body, "model": model})


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_adapters_are_loaded_chosen_and_unloaded_on_every_router_and_replica(
    cluster, client, adapter_folder
):
    for name, seed in (("x", 1), ("y", 2)):
        save_adapter(adapter_folder / name, CHECKPOINT, rank=4, seed=seed, size=0.7)
    base = client.get("/v1/models").json()["data"][0]
    plain = text(answer(client, base["id"]))
    missing = answer(client, "x")
    assert missing.status_code == 404
    loaded = client.post("/v1/adapters", json={"name": "x", "path": "x"})
    assert loaded.status_code == 200, loaded.text
    assert loaded.json() | {"created": 0} == base | {"id": "x", "parent": base["id"], "created": 0}
    # The router that got the call has told the other one; requests reach both, and both replicas.
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: text(answer(client, "x")), range(16)))
        assert len(set(texts)) == 1 and texts[0] != plain
        for _ in range(4):
            ids = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert ids == [base["id"], "x"]
    with cluster.channel() as channel:
        control = control_pb2_grpc.ControlStub(channel)
        request = control_pb2.LoadAdapterRequest(name="x", path="y")
        digest = control.LoadAdapter(request).adapter.digest
        listed = control.ListAdapters(control_pb2.ListAdaptersRequest()).adapters
        assert [adapter.digest for adapter in listed] == [digest]
        replaced = text(answer(client, "x"))
        assert replaced not in (plain, texts[0])
        with pytest.raises(grpc.RpcError) as refused:
            control.LoadAdapter(control_pb2.LoadAdapterRequest(name="z", path="../x"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        control.UnloadAdapter(control_pb2.UnloadAdapterRequest(name="x"))
    for _ in range(4):
        gone = answer(client, "x")
        assert gone.status_code == 404
        assert gone.json() == missing.json()
    assert client.delete("/v1/adapters/x").status_code == 404
    assert text(answer(client, base["id"])) == plain


def test_requests_with_an_adapter_return_to_the_replica_that_has_it(
    cluster, client, adapter_folder
):
    """Both replicas have read it. After the first request one has it on its device, which both routers learn."""
    save_adapter(adapter_folder / "kept", CHECKPOINT, rank=4, seed=3, size=0.7)
    assert client.post("/v1/adapters", json={"name": "kept", "path": "kept"}).status_code == 200
    answers: list[httpx.Response] = []
    for i in range(40):
        # Prompts without a common beginning, so that no replica has a prefix. New connections reach both routers.
        body = {"model": "kept", "prompt": f"{i} bells", "max_tokens": 4, "ignore_eos": True}
        with httpx.Client(base_url=cluster.url, timeout=60) as other:
            answers.append(other.post("/v1/completions", json=body))
        assert answers[-1].status_code == 200, answers[-1].text
        if i >= 7 and len({answered.headers["x-quire-router"] for answered in answers}) == 2:
            break
    assert len({answered.headers["x-quire-router"] for answered in answers}) == 2
    rankings = []
    for answered in answers:
        query = {"request_id": answered.json()["id"]}
        (decision,) = client.get("/v1/router/explain", params=query).json()["data"]
        rankings.append(decision["ranking"])
    first, *later = rankings
    assert all(score["terms"]["adapter_s"] > 0 for score in first), "only in host memory"
    for best, second in later:
        assert best["replica"] == first[0]["replica"]
        assert best["terms"]["adapter_s"] == 0 < second["terms"]["adapter_s"]
    assert client.delete("/v1/adapters/kept").status_code == 200


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(cluster, client, adapter_folder):
    save_adapter(adapter_folder / "dora", CHECKPOINT, use_dora=True)
    refused = client.post("/v1/adapters", json={"name": "dora", "path": "dora"})
    assert refused.status_code == 400
    assert "DoRA is not supported" in refused.json()["error"]["message"]
    assert len(client.get("/v1/models").json()["data"]) == 1
