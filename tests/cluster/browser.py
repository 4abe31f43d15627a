"""A headless Chromium, through the W3C WebDriver protocol of chromedriver. On Debian: apt install chromium-driver."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

NEEDS = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
_FLAGS = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """One window.

    Parameters
    ----------
    client
        Of the session's URL.
    """

    def __init__(self, client: httpx.Client, session: str):
        self._client = client
        self._session = f"/session/{session}"

    def _ask(self, path: str, **body: Any) -> Any:
        answer = self._client.post(self._session + path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer

    def devtools(self, command: str, **params: Any) -> Any:
        """Call a command of Chromium's DevTools protocol."""
        return self._ask("/goog/cdp/execute", cmd=command, params=params)

    def open(self, url: str) -> None:
        self._ask("/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """Return the value of the body of a JavaScript function; a promise's when it is fulfilled."""
        return self._ask("/execute/sync", script=script, args=list(args))

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        actions = [{"type": t, "value": key} for key in keys for t in ("keyDown", "keyUp")]
        self._ask("/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.devtools("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """The errors that the browser has logged since the last call, refusals by a policy among them."""
        log = self._ask("/se/log", type="browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def until(self, condition: str, *args: Any, timeout_s: float = 60.0) -> float:
        """Wait until a JavaScript expression is true; return the seconds that it took."""
        return wait_for(lambda: self.run(f"return {condition}", *args), condition, timeout_s)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> float:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began_s


@contextmanager
def chromium(port: int) -> Iterator[Browser]:
    """Run a browser; chromedriver listens on `port`."""
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--log-level=SEVERE"], stdout=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

            def is_ready() -> bool:
                try:
                    return client.get("/status").json()["value"]["ready"]
                except httpx.TransportError:
                    return False

            wait_for(is_ready, "chromedriver")
            # Chromium's sandbox refuses to run as root, as in a container.
            flags = _FLAGS + ["--no-sandbox"] * (os.geteuid() == 0)
            wanted = {
                "goog:chromeOptions": {"args": flags},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()
            session = answer["value"]["sessionId"]
            try:
                yield Browser(client, session)
            finally:
                client.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait()
