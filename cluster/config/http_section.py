"""The sections `http` and `metrics` of an application's arguments."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from quire.cluster.config.config_problems import shortened
from quire.cluster.config.section import Section

_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
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

    allowed_hosts: list[str] | None = Field(
        default=None,
        max_length=256,
        description="Host names of this server, such as llm.example.com: a request that names another one in its "
        "header Host is refused, so that no web page can pass this server off as its own (DNS rebinding). localhost "
        "and IP addresses are always allowed. '*' allows all names. Default: no others if http_options.host is a "
        "loopback address, else all.",
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

    @field_validator("allowed_hosts")
    @classmethod
    def _names_without_port(cls, hosts: list[str] | None) -> list[str] | None:
        for host in hosts or ():
            if host != "*" and not _HOST.fullmatch(host):
                raise ValueError(
                    f"each host must be '*' or a name in lower case without a port, such as 'llm.example.com', got "
                    f"{shortened(host)}"
                )
        return hosts


class MetricsArgs(Section):
    """The answer to `GET /metrics`."""

    vllm_names: bool = Field(
        default=False,
        description="Expose vLLM's names (`vllm:num_requests_running` and others) in addition to Quire's, for "
        "dashboards and gateways that read those.",
    )
