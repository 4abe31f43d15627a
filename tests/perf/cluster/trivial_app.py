"""An empty Serve application, to measure the start of Ray and Serve themselves."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1})
class Nothing:
    """Answers every request."""

    async def __call__(self) -> str:
        return "ok"


def build(args: dict[str, Any]) -> Application:
    """The application; `args` are empty."""
    return Nothing.bind()
