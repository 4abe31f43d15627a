"""Certificates for tests: an authority that signs them, and their files."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM form."""

    certificate: bytes
    key: bytes
    serial: int

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """Write `name.crt` and `name.key`; return their paths."""
        folder.mkdir(exist_ok=True)
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        for path, data in zip(paths, (self.certificate, self.key), strict=True):
            path.write_bytes(data)
        return str(paths[0]), str(paths[1])


class Authority:
    """Signs certificates of servers on the loopback, and of clients."""

    def __init__(self, name: str = "authority"):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key, -DAY, 30 * DAY)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        built = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.certificate = built.public_bytes(serialization.Encoding.PEM)

    def write(self, path: Path) -> str:
        path.write_bytes(self.certificate)
        return str(path)

    def issue(
        self,
        name: str = "server",
        since: datetime.timedelta = -DAY,
        until: datetime.timedelta = DAY,
    ) -> Issued:
        """Sign a certificate that is valid from `since` to `until`, both from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        addresses = [
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.DNSName("localhost"),
        ]
        built = (
            self._builder(subject, key, since, until)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(
            built.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            built.serial_number,
        )

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        since: datetime.timedelta,
        until: datetime.timedelta,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        public = key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
