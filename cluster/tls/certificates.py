"""Reads and checks the files of the section `tls`: certificate, private key, the clients' authorities."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

from quire.cluster.config.tls_section import TlsArgs

MAX_FILE_BYTES = 1 << 20


class CertificateError(ValueError):
    """A file of the section `tls` cannot be used. The message names the field and the file, never a part of a key."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Checked contents of the files, in PEM form without text between the parts."""

    # The certificate, its chain and its private key.
    server: bytes = field(repr=False)
    # None: clients need no certificate.
    client_authorities: bytes | None = field(repr=False)
    expires: datetime.datetime


def read_certificates(args: TlsArgs, now: datetime.datetime | None = None) -> Certificates:
    """Read and check all files.

    Parameters
    ----------
    now
        With a time zone. Default: the current time.

    Raises
    ------
    CertificateError
        A file cannot be read or parsed, the key does not belong to the certificate, or the certificate is not valid
        now.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    chain = _certificates("certificate_file", args.certificate_file)
    leaf = chain[0]
    if reason := _why_invalid(leaf, now):
        raise CertificateError(f"tls.certificate_file: in {args.certificate_file!r} {reason}")
    key = _private_key(args.key_file)
    if _public_bytes(key.public_key()) != _public_bytes(leaf.public_key()):
        raise CertificateError(
            f"tls.key_file: the key in {args.key_file!r} does not match the certificate in "
            f"{args.certificate_file!r} (tls.certificate_file)"
        )
    authorities = None
    if args.client_ca_file is not None:
        found = _certificates("client_ca_file", args.client_ca_file)
        reasons = [_why_invalid(authority, now) for authority in found]
        # While authorities are replaced, a file has old ones and new ones.
        if all(reasons):
            raise CertificateError(f"tls.client_ca_file: in {args.client_ca_file!r} {reasons[0]}")
        authorities = _pem(found)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Certificates(_pem(chain) + key_pem, authorities, leaf.not_valid_after_utc)


def _certificates(name: str, path: str) -> list[x509.Certificate]:
    """The certificates of a file, at least one."""
    data = _read(name, path)
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise CertificateError(
            f"tls.{name}: {path!r} has no certificates in PEM form: {error}"
        ) from None


def _private_key(path: str) -> PrivateKeyTypes:
    data = _read("key_file", path)
    try:
        return serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise CertificateError(
            f"tls.key_file: the key in {path!r} needs a passphrase; give a key without one"
        ) from None
    except ValueError:
        raise CertificateError(f"tls.key_file: {path!r} has no private key in PEM form") from None


def _read(name: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CertificateError(f"tls.{name}: cannot read {path!r}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise CertificateError(f"tls.{name}: {path!r} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _why_invalid(certificate: x509.Certificate, now: datetime.datetime) -> str | None:
    who = certificate.subject.rfc4514_string()
    until, since = certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if until <= now:
        return f"the certificate {who!r} expired at {until:%Y-%m-%d %H:%M:%S} UTC"
    if since > now:
        return f"the certificate {who!r} is valid from {since:%Y-%m-%d %H:%M:%S} UTC"
    return None


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _pem(certificates: list[x509.Certificate]) -> bytes:
    return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in certificates)
