"""Makes the picture of the live page in the documents: real engines and a real router, without Ray.

    python tests/cluster/live_page_picture.py docs/live_page.png [dark]

Four replicas of the embedded model answer conversations of several users; one of the replicas is lost on the way.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import uvicorn

sys.path.append(str(Path(__file__).parents[1] / "router"))  # for `local_serve`

from browser import chromium
from local_serve import LocalCluster, start_replica

from quire.cluster.app import APIS
from quire.cluster.http.http_api import build_app
from quire.cluster.local.ports import free_ports
from quire.replica.builtin_model import CHECKPOINT
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.router_metrics import RouterMetrics
from quire.router.request.service import RouterService
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.types import GenerationRequest

ENGINE = {
    "model": "embedded",
    "device": "cpu",
    "num_blocks": 600,
    "block_size": 16,
    "max_model_len": 1024,
    "num_threads": 1,
}
NAMES = ("c6md4faj", "14ndmj1w", "r52qk8yd", "x0w7tb3h")
USERS, SECONDS, WIDTH, HEIGHT = 10, 45, 1280, 800


async def converse(service: RouterService, user: int, rng: random.Random) -> None:
    """One user's conversations: each turn has all turns before."""
    words = (
        "the",
        "harbour",
        "letter",
        "quire",
        "sheet",
        "folded",
        "lamp",
        "tide",
        "again",
        "north",
    )
    number = 0
    while True:
        text = f"You answer questions about bookbinding. {' '.join(rng.choices(words, k=60))}"
        for turn in range(rng.randint(2, 6)):
            number += 1
            request = GenerationRequest(
                request_id=f"user-{user}-{number}",
                prompt=text,
                max_tokens=rng.randint(10, 60),
                temperature=0.7,
                ignore_eos=True,
            )
            async for delta in await service.generate(request):
                text += delta.text
            text += " ".join(rng.choices(words, k=12))
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            if len(text) > 2500 or turn > 5:
                break


async def run(path: Path, *, dark: bool) -> None:
    patch: Any = pytest.MonkeyPatch()
    replicas = [await start_replica(name, patch, **ENGINE) for name in NAMES]
    cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
    await cluster.start()
    service = RouterService(
        ModelFacts(name="embedded", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
        router_id=cluster.router_id,
        tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
        template=ChatTemplate.load(CHECKPOINT, None),
        table=cluster.table,
        policy=make_policy("slo"),
        transport=cluster.bus,
        observer=RouterMetrics(),
    )
    app = build_app(lambda: service, max_body_bytes=1 << 20, apis=APIS)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    users = [
        asyncio.create_task(converse(service, user, random.Random(user))) for user in range(USERS)
    ]

    def photograph() -> bytes:
        with chromium(free_ports(1)[0]) as browser:
            browser.look(WIDTH, HEIGHT, dark=dark)
            browser.open(f"http://127.0.0.1:{listener.getsockname()[1]}/ui")
            browser.until("document.querySelectorAll('#moves li').length > 0", timeout_s=300)
            browser.until("document.querySelectorAll('#requests tr').length >= 20", timeout_s=300)
            return browser.screenshot()

    picture = asyncio.create_task(asyncio.to_thread(photograph))
    await asyncio.sleep(SECONDS)
    await replicas[1].die()
    cluster.membership.update(frozenset(NAMES) - {NAMES[1]})
    path.write_bytes(await picture)
    for user in users:
        user.cancel()
    await asyncio.gather(*users, return_exceptions=True)
    server.should_exit = server.force_exit = True
    await serving
    await cluster.bus.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), dark="dark" in sys.argv[2:]))
