"""The section `tls` of an application's arguments."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from quire.cluster.config.config_problems import shortened
from quire.cluster.config.section import NodePath, Section


class TlsArgs(Section):
    """TLS for clients, on ports of its own next to the plain ones."""

    certificate_file: NodePath = Field(
        min_length=1,
        description="Path on each node to the server's certificate in PEM form, followed by its chain, for example in "
        "a mounted Kubernetes secret. A changed file applies to new connections; open streams stay.",
    )
    key_file: NodePath = Field(
        min_length=1,
        description="Path on each node to the certificate's private key in PEM form, without a passphrase.",
    )
    client_ca_file: NodePath | None = Field(
        default=None,
        min_length=1,
        description="Path on each node to the certificates, in PEM form, of the authorities that sign clients' "
        "certificates. A client without a valid one cannot connect. Default: clients need no certificate.",
    )
    host: str = Field(
        default="0.0.0.0",
        description="IP address on which the TLS ports listen. 0.0.0.0: all interfaces.",
    )
    http_port: int = Field(default=8443, ge=1, le=65535, description="Port for HTTPS.")
    grpc_port: int = Field(default=9443, ge=1, le=65535, description="Port for gRPC with TLS.")
    min_version: Literal["1.2", "1.3"] = Field(
        default="1.2", description="Oldest version of TLS that clients may use."
    )

    @field_validator("host")
    @classmethod
    def _is_address(cls, host: str) -> str:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"must be an IP address, got {shortened(host)}") from None
        return host

    def conflicts(self) -> Iterator[str]:
        if self.http_port == self.grpc_port:
            yield f"grpc_port must differ from http_port, got {self.grpc_port} for both"
