"""The image without a container runtime: each RUN of the Dockerfile in a fresh root, then the pod's start in it.

Minutes, network, root, `debootstrap`: `make image`, which also writes the result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cluster.bench.results import report

from .image_root import Stage, Step, build, lacks
from .image_start import start
from .manifests import K8S, ROOT, dockerfile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(lacks()), reason=lacks()),
]


@pytest.fixture(scope="module")
def image() -> Iterator[tuple[Stage, list[Step]]]:
    """The last stage and the steps. The CPU image: its packages are a tenth of the size."""
    folder = Path(tempfile.mkdtemp(prefix="image-", dir=os.environ.get("IMAGE_FOLDER")))
    try:
        yield build(folder, {"LOCK": "requirements-cpu.lock"})
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def found(image: tuple[Stage, list[Step]]) -> dict:
    return start(image[0])


def test_every_run_step_succeeds(image: tuple[Stage, list[Step]]) -> None:
    stage, steps = image
    text = (K8S / "Dockerfile").read_text(encoding="utf-8")
    assert len(steps) == sum(name == "RUN" for name, _ in dockerfile(text)) == 5
    assert stage.ports == [8000, 9000]


def test_the_image_has_no_sources_and_no_caches(image: tuple[Stage, list[Step]]) -> None:
    root = image[0].root
    for path in ("src", "dist", "root/.cache/pip", "var/lib/apt/lists/partial"):
        assert not list((root / path).glob("*")), path


def test_the_pod_runs_as_the_user_with_nothing_writable(found: dict) -> None:
    assert (found["uid"], found["groups"]) == (1000, [])
    assert int(found["capabilities"], 16) == 0
    assert found["written"] == []
    assert found["help"].startswith("usage: quire")


def test_ports_and_probes_answer(found: dict) -> None:
    assert found["healthz"]
    assert found["grpc_health"] == 1  # SERVING
    assert found["completion_tokens"] == 8
    assert found["metrics"] > 50 and found["ray_metrics"] > 50
    assert found["compiled"] == ["kernels", "router"]


def test_the_result_is_written(image: tuple[Stage, list[Step]], found: dict) -> None:
    out = os.environ.get("IMAGE_OUT")
    if not out:
        pytest.skip("`make image` names the file")
    _, steps = image
    seconds = {f"{i}: {step.text[:80]}": round(step.seconds, 1) for i, step in enumerate(steps, 1)}
    bars = [
        report.Bar("image/run_steps", len(steps), "steps", 5, at_most=False, details=seconds),
        report.Bar(
            "image/readiness_s",
            found["seconds"]["readiness"],
            "s",
            600,
            details={"raylet_s": round(found["seconds"]["raylet"], 1)} | found_details(found),
        ),
    ]
    report.write(ROOT / out, "make image", bars)


def found_details(found: dict) -> dict:
    return {name: found[name] for name in ("uid", "healthz", "grpc_health", "compiled", "metrics")}
