"""The sections `http`, `metrics` and `tracing` of an application's arguments."""

from __future__ import annotations

import re
from typing import Literal, get_args

from pydantic import Field, field_validator

from quire.cluster.config.config_problems import shortened
from quire.cluster.config.section import Section

_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
# The Origin header of a browser: scheme and host, and the port unless it is the scheme's default.
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")

TraceProtocol = Literal["grpc", "http/protobuf"]
TRACE_PROTOCOLS: tuple[str, ...] = get_args(TraceProtocol)
_ENDPOINT = re.compile(r"https?://[^/\s]+(/\S*)?")


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


class TracingArgs(Section):
    """Traces of requests, for an OpenTelemetry collector."""

    endpoint: str | None = Field(
        default=None,
        description="URL of the collector, such as http://collector:4317; with https:// the connection uses TLS. "
        "Default: the variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT of each router's "
        "process, else this machine and the protocol's usual port.",
    )
    protocol: TraceProtocol | None = Field(
        default=None,
        description="Protocol of the collector: grpc (usual port 4317) or http/protobuf (4318). Default: the variable "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL, else grpc.",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests without a `traceparent` that are traced. A request with one is traced if "
        "its flag `sampled` is set.",
    )
    max_queued_spans: int = Field(
        default=8192,
        ge=64,
        le=1_000_000,
        description="Most spans that wait in one router for an export. A trace that finds no room is dropped and "
        "counted. A span takes about 1 kB.",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise ValueError(
                f"must be a URL with http:// or https:// and a host, such as 'http://collector:4317', got "
                f"{shortened(endpoint)}"
            )
        return endpoint
