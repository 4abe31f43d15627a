"""The section `http` of an application's arguments."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from quire.cluster.config.config_problems import shortened
from quire.cluster.config.section import Section

# The Origin header of a browser: scheme and host, and the port unless it is the scheme's default.
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")


class HttpArgs(Section):
    """Options of each router's HTTP front end."""

    keepalive_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Seconds between comments (`: keep-alive`) on a stream that has no token yet, so that proxies do "
        "not close the connection. Status and headers are sent with the first comment, so a later refusal"
        " is an error event. Some clients fail on any comment. 0 turns comments off.",
    )
    cors_origins: list[str] = Field(
        default=[],
        max_length=256,
        description="Origins of web pages whose scripts may call this API from a browser, such as "
        "https://chat.example.com. '*' allows all pages. Browsers send no cookies. Default: none.",
    )

    @field_validator("cors_origins")
    @classmethod
    def _as_browsers_send_them(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"each origin must be '*', or scheme and host in lower case with a port if it is not the usual "
                    f"one, such as 'https://chat.example.com', got {shortened(origin)}"
                )
        return origins
