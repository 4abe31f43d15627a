"""The key file, the keys in memory, and the command that writes the file."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster import cli
from quire.cluster.auth.access_control import secret_of, secret_of_metadata
from quire.cluster.auth.access_rules import Right
from quire.cluster.auth.key_file import (
    MAX_FILE_BYTES,
    KeyFileError,
    new_key,
    parse_keys,
    read_key_file,
)

DIGEST = hashlib.sha256(b"secret").hexdigest()
ENTRY = {"sha256": DIGEST, "name": "ci", "tenant": "team-a", "rights": ["generate"]}


def test_json_and_yaml_say_the_same(tmp_path):
    data = {
        "keys": [
            {
                **ENTRY,
                "models": ["a/b"],
                "quotas": {"tokens_per_minute": 5},
                "expires": "2027-01-31T00:00:00Z",
            }
        ]
    }
    (tmp_path / "a.json").write_text(json.dumps(data))
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump(data).replace("'2027", "2027").replace("Z'", "Z")
    )
    assert read_key_file(tmp_path / "a.json") == read_key_file(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sha256": "secret-itself"}, "keys[0].sha256: String should match"),
        ({"sha256": DIGEST + "\n"}, "keys[0].sha256"),
        ({"name": "two words"}, "keys[0].name"),
        ({"tenant": "a/b"}, "keys[0].tenant"),
        ({"rights": []}, "keys[0].rights"),
        ({"rights": ["root"]}, "keys[0].rights.0"),
        ({"quotas": {"tokens_per_minute": 0}}, "keys[0].quotas.tokens_per_minute"),
        ({"quotas": {"requests": 1}}, "keys[0].quotas.requests: Extra inputs"),
        ({"expires": "2027-01-31T00:00:00"}, "keys[0].expires"),
        ({"rigths": ["generate"]}, "keys[0].rigths: Extra inputs"),
    ],
)
def test_an_error_names_the_field_and_never_the_value(change: dict, problem: str):
    with pytest.raises(KeyFileError) as caught:
        parse_keys({"keys": [ENTRY | change]})
    assert problem in str(caught.value)
    assert DIGEST not in str(caught.value) and "secret-itself" not in str(caught.value)


def test_names_and_digests_are_unique():
    with pytest.raises(KeyFileError) as caught:
        parse_keys({"keys": [ENTRY, ENTRY | {"tenant": "team-b"}]})
    assert "have the same name" in str(caught.value) and "have the same sha256" in str(caught.value)
    assert DIGEST not in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"keys": {}}', b'{"keys": [', b"a: [\n- '", b"\xff", b'{"a": 1}']
)
def test_a_file_that_is_no_key_file_is_refused(tmp_path, raw: bytes):
    path = tmp_path / "keys"
    path.write_bytes(raw)
    with pytest.raises(KeyFileError, match="keys: "):
        read_key_file(path)


def test_a_large_file_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(KeyFileError, match=f"at most {MAX_FILE_BYTES} bytes"):
        read_key_file(path)


# --------------------------------------------------------------------------------------------------
# Keys in memory
# --------------------------------------------------------------------------------------------------


def test_a_key_is_found_until_it_expires(keys):
    secret = keys.add("short", "generate", expires="2027-01-01T00:00:00Z")
    now = [0.0]
    ring = keys.ring(clock=lambda: now[0])
    assert ring.find(secret.encode()).entry.name == "short"
    now[0] = 2e9
    assert ring.find(secret.encode()) is None
    assert ring.find(keys.secrets["generate"].encode()) is not None
    for wrong in (b"", b"x", secret[:-1].encode(), secret.encode() + b"x", b"a" * 10_000):
        assert ring.find(wrong) is None


def test_admin_has_all_rights_and_others_their_own(keys):
    ring = keys.ring()
    rights = {name: ring.find(secret.encode()).rights for name, secret in keys.secrets.items()}
    assert rights["admin"] == {Right.ANY_KEY, Right.GENERATE, Right.OBSERVE, Right.ADMIN}
    assert rights["generate"] == {Right.ANY_KEY, Right.GENERATE}
    assert rights["observe"] == {Right.ANY_KEY, Right.OBSERVE}


def test_a_changed_file_is_read_and_a_bad_one_changes_nothing(keys, caplog):
    ring = keys.ring()
    old = keys.secrets["generate"].encode()
    meter = ring.find(old).meter
    added = keys.add("added", "generate", quotas={"concurrent_requests": 1}).encode()
    assert ring.find(added) is None
    ring.poll()
    assert ring.find(added) is not None
    assert ring.find(old).meter is meter  # what is used stays used
    keys.path.write_text("{broken")
    ring.poll()
    keys.path.unlink()
    ring.poll()
    assert ring.find(added) is not None and ring.find(old) is not None
    assert "not valid JSON" in caplog.text and "cannot be read" in caplog.text
    keys.entries = keys.entries[1:]
    keys.write()
    ring.poll()
    assert ring.find(old) is None


def test_quotas_of_a_changed_file_apply(keys):
    secret = keys.add("bounded", "generate", quotas={"tokens_per_minute": 5}).encode()
    ring = keys.ring()
    keys.entries[-1]["quotas"] = {"tokens_per_minute": 700}
    keys.write()
    ring.poll()
    assert ring.find(secret).meter.quotas.tokens_per_minute == 700


def test_a_kubernetes_secret_is_followed_through_its_links(keys, tmp_path):
    """A mounted secret is a link to ..data/keys.json, and ..data a link that is replaced."""
    mount = tmp_path / "mount"
    for version in ("one", "two"):
        (mount / version).mkdir(parents=True)
    (mount / "one" / "keys.json").write_text(json.dumps({"keys": keys.entries[:1]}))
    (mount / "two" / "keys.json").write_text(json.dumps({"keys": keys.entries[:1]}))
    (mount / "..data").symlink_to("one")
    (mount / "keys.json").symlink_to("..data/keys.json")
    keys.path = mount / "keys.json"
    ring = keys.ring()
    added = keys.entries[1]
    # Same size and time: only the file behind the links differs.
    two = mount / "two" / "keys.json"
    two.write_text(
        json.dumps({"keys": [added]}).ljust((mount / "one" / "keys.json").stat().st_size)
    )
    times = (mount / "one" / "keys.json").stat()
    os.utime(two, ns=(times.st_atime_ns, times.st_mtime_ns))
    (mount / "..new").symlink_to("two")
    (mount / "..new").replace(mount / "..data")
    ring.poll()
    assert ring.find(keys.secrets["observe"].encode()) is not None
    assert ring.find(keys.secrets["generate"].encode()) is None


def test_a_thread_looks_at_the_file(keys, monkeypatch):
    monkeypatch.setattr("quire.cluster.auth.key_ring.POLL_S", 0.01)
    ring = keys.ring()
    ring.start()
    try:
        secret = keys.add("later", "generate").encode()
        deadline_s = time.monotonic() + 10
        while ring.find(secret) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        ring.close()


def test_labels_are_bounded_for_ever(keys):
    ring = keys.ring(max_labels=2)
    assert {key.label for key in ring._keys.values()} == {"team-a", "ops", "other"}
    keys.entries = []
    for i in range(20):
        keys.add(f"key-{i}", "generate", tenant=f"tenant-{i}")
    ring.poll()
    assert {key.label for key in ring._keys.values()} == {"other"}
    keys.add("again", "generate", tenant="ops")
    ring.poll()
    assert ring.find(keys.secrets["again"].encode()).label == "ops"


# --------------------------------------------------------------------------------------------------
# What a client sends
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "secret"),
    [
        ([], None),
        ([(b"authorization", b"Bearer abc")], b"abc"),
        ([(b"authorization", b"bearer  abc ")], b"abc"),
        ([(b"x-api-key", b"abc")], b"abc"),
        ([(b"x-api-key", b"first"), (b"x-api-key", b"second")], b"first"),
        ([(b"x-api-key", b"no"), (b"authorization", b"Bearer yes")], b"yes"),
        ([(b"authorization", b"Basic no"), (b"x-api-key", b"yes")], b"yes"),
        ([(b"authorization", b"Bearer")], None),
    ],
)
def test_where_a_key_is(headers, secret):
    assert secret_of(headers) == secret
    metadata = [(name.decode(), value.decode()) for name, value in headers]
    assert secret_of_metadata([("user-agent", "x"), ("blob-bin", b"\0"), *metadata]) == secret


@given(
    st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key"]), st.binary(max_size=30)))
)
def test_no_headers_are_a_key_by_accident(headers):
    secret = secret_of(headers)
    assert secret is None or isinstance(secret, bytes)


# --------------------------------------------------------------------------------------------------
# quire keys
# --------------------------------------------------------------------------------------------------


def quire_keys(*arguments: object) -> int:
    return cli.main(["keys", *map(str, arguments)])


def test_create_list_and_revoke(tmp_path, capsys):
    path = tmp_path / "keys.json"
    create = ("create", path, "--tenant", "team-a", "--name")
    assert quire_keys(*create, "ci", "--right", "generate", "--right", "observe") == 0
    secret = capsys.readouterr().out.strip()
    options = ("--tokens-per-minute", 1000, "--concurrent-requests", 3, "--model", "m")
    assert quire_keys(*create, "short", *options, "--expires", "2027-01-31T00:00:00Z") == 0
    capsys.readouterr()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]
    first, second = read_key_file(path)
    assert first.digest == hashlib.sha256(secret.encode()).digest()
    assert second.rights == ["generate"] and second.quotas.concurrent_requests == 3
    assert quire_keys("list", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "ci: tenant team-a; rights generate, observe; models all",
        "short: tenant team-a; rights generate; models m; tokens_per_minute 1000; concurrent_requests 3; "
        "expires 2027-01-31T00:00:00+00:00",
    ]
    assert quire_keys("revoke", path, "ci") == 0
    assert [entry.name for entry in read_key_file(path)] == ["short"]


def test_create_replaces_the_file_behind_a_link(tmp_path, capsys):
    (tmp_path / "real").mkdir()
    (tmp_path / "keys.json").symlink_to(tmp_path / "real" / "keys.json")
    path = tmp_path / "keys.json"
    assert quire_keys("create", path, "--name", "a", "--tenant", "t") == 0
    assert path.is_symlink() and len(read_key_file(path)) == 1


def test_mistakes_are_named_and_leave_the_file(tmp_path, capsys):
    path = tmp_path / "keys.json"
    assert quire_keys("create", path, "--name", "a", "--tenant", "t") == 0
    before = path.read_text()
    for arguments, problem in [
        (("create", path, "--name", "a", "--tenant", "t"), "have the same name"),
        (("create", path, "--name", "b c", "--tenant", "t"), "keys[1].name"),
        (
            ("create", path, "--name", "b", "--tenant", "t", "--tokens-per-minute", 0),
            "tokens_per_minute",
        ),
        (("revoke", path, "b"), "no key has the name 'b'; there are a"),
        (("list", tmp_path / "none.json"), "cannot be read"),
        (
            ("create", tmp_path / "no" / "k.json", "--name", "a", "--tenant", "t"),
            "cannot be written",
        ),
    ]:
        capsys.readouterr()
        assert quire_keys(*arguments) == 1
        captured = capsys.readouterr()
        assert problem in captured.err and "sk-quire-" not in captured.out
    assert path.read_text() == before


def test_keys_are_long_and_differ():
    made = {new_key()[0] for _ in range(100)}
    assert len(made) == 100 and all(len(key) >= 50 for key in made)
    assert all(Path(key).name == key for key in made)  # safe in URLs and shells
