"""What the files of the section `tls` must hold, and the messages about what is wrong."""

from __future__ import annotations

import pytest
from authority import DAY, Authority
from cryptography.hazmat.primitives import serialization

from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.tls.certificates import MAX_FILE_BYTES, CertificateError, read_certificates


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def args_of(tmp_path, issued, **more) -> TlsArgs:
    certificate_file, key_file = issued.write(tmp_path, "server")
    return TlsArgs(certificate_file=certificate_file, key_file=key_file, **more)


def test_the_chain_and_the_key_are_kept_without_text_between_them(tmp_path, authority):
    issued = authority.issue()
    args = args_of(tmp_path, issued)
    text = b"subject: server\n\n" + issued.certificate + b"\n\nissuer:\n" + authority.certificate
    (tmp_path / "server.crt").write_bytes(text)
    found = read_certificates(args)
    assert found.server == issued.certificate + authority.certificate + issued.key
    assert found.client_authorities is None
    assert b"PRIVATE" not in repr(found).encode()


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [(-2 * DAY, -DAY, "expired at 20"), (DAY, 2 * DAY, "is valid from 20")],
)
def test_a_certificate_must_be_valid_now(tmp_path, authority, since, until, words):
    args = args_of(tmp_path, authority.issue("old", since, until))
    with pytest.raises(CertificateError) as caught:
        read_certificates(args)
    message = str(caught.value)
    assert message.startswith(f"tls.certificate_file: in {args.certificate_file!r} ")
    assert f"the certificate 'CN=old' {words}" in message


def test_the_key_must_match_the_certificate(tmp_path, authority):
    args = args_of(tmp_path, authority.issue())
    (tmp_path / "server.key").write_bytes(authority.issue().key)
    with pytest.raises(CertificateError, match=r"tls.key_file: the key in .* does not match .*crt"):
        read_certificates(args)


@pytest.mark.parametrize("name", ["certificate_file", "key_file", "client_ca_file"])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "cannot read '.*': No such file or directory"),
        (b"nothing", "'.*' has no (certificates|private key) in PEM form"),
        (b"x" * (MAX_FILE_BYTES + 1), "is larger than 1048576 bytes"),
    ],
    ids=["missing", "other text", "too large"],
)
def test_each_file_must_have_its_form(tmp_path, authority, name, data, words):
    args = args_of(tmp_path, authority.issue(), client_ca_file=authority.write(tmp_path / "ca.crt"))
    path = tmp_path / "other"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CertificateError, match=rf"tls.{name}: .*{words}"):
        read_certificates(args.model_copy(update={name: str(path)}))


def test_a_key_with_a_passphrase_is_refused(tmp_path, authority):
    issued = authority.issue()
    args = args_of(tmp_path, issued)
    key = serialization.load_pem_private_key(issued.key, None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    (tmp_path / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, encryption)
    )
    with pytest.raises(CertificateError, match=r"tls.key_file: the key in .* needs a passphrase"):
        read_certificates(args)


def test_an_old_authority_of_clients_may_stay_next_to_its_successor(tmp_path, authority):
    old = authority.issue("old-authority", -2 * DAY, -DAY).certificate
    path = tmp_path / "clients.crt"
    args = args_of(tmp_path, authority.issue(), client_ca_file=str(path))
    path.write_bytes(old + authority.certificate)
    assert read_certificates(args).client_authorities == old + authority.certificate
    path.write_bytes(old)
    with pytest.raises(CertificateError, match=r"tls.client_ca_file: .*'CN=old-authority' expired"):
        read_certificates(args)
