"""The section `http` of an application's arguments."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from quire.cluster.config.config_problems import shortened
from quire.cluster.config.section import Section

# What browsers send as Origin: scheme and host, and the port if it is not the scheme's own.
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")


class HttpArgs(Section):
    """What each router's HTTP front end does."""

    keepalive_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Seconds after which a stream without its first token sends a comment (`: keep-alive`), again and "
        "again, so that no proxy takes the connection for dead. Its status and headers go out with the first comment, "
        "so a later refusal is an error event. Some clients fail on any comment. 0 turns it off.",
    )
    cors_origins: list[str] = Field(
        [],
        max_length=256,
        description="Origins of web pages whose scripts may call this API from a browser, such as "
        "https://chat.example.com; '*' allows all pages. Browsers send no cookies. Default: none.",
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
