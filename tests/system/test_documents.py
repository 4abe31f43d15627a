"""The blocks of the documents that need a server run against a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from live import Cluster

from tests.docs.documents import ROOT, Block, Runner, blocks, documents

pytestmark = pytest.mark.system


def on_a_server(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.needs == "server"]


@pytest.mark.parametrize(
    "path",
    [path for path in documents() if on_a_server(path)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_blocks_that_need_a_server_run(path: Path, cluster: Cluster, tmp_path: Path):
    runner = Runner(tmp_path, {8000: cluster.http_port, 9000: cluster.grpc_port})
    for block in on_a_server(path):
        runner.run(block)
