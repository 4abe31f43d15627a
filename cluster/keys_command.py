"""`quire keys`: creates, lists and revokes the keys of a key file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.cluster.auth.key_file import (
    KeyEntry,
    KeyFileError,
    new_key,
    parse_keys,
    read_key_file,
    write_key_file,
)

_RIGHTS = ("generate", "observe", "admin")


def add_keys(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `quire`."""
    parser = commands.add_parser("keys", help="create, list or revoke keys of a key file")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create",
        help="add a key and print it",
        description="Adds a key to FILE, which is made if it is missing, and prints the key. FILE gets only a digest, "
        "so the key cannot be shown again. FILE is rewritten as JSON with mode 0600; routers read it within a second.",
    )
    _add_file(create)
    create.add_argument("--name", required=True, help="unique name of the key")
    create.add_argument("--tenant", required=True, help="the tenant that pays")
    create.add_argument(
        "--right",
        action="append",
        choices=_RIGHTS,
        help="what the key may do; may be given several times (default: generate)",
    )
    create.add_argument(
        "--model",
        action="append",
        default=[],
        help="an allowed model; may be given several times (default: all)",
    )
    create.add_argument("--tokens-per-minute", type=int, help="quota of prompt and output tokens")
    create.add_argument("--concurrent-requests", type=int, help="quota of running requests")
    create.add_argument("--expires", help="time of its end, such as 2027-01-31T00:00:00Z")
    create.set_defaults(run=_create)
    listing = actions.add_parser("list", help="print the keys' names and rights")
    _add_file(listing)
    listing.set_defaults(run=_list)
    revoke = actions.add_parser("revoke", help="remove a key; requests of it that run are finished")
    _add_file(revoke)
    revoke.add_argument("name", help="name of the key")
    revoke.set_defaults(run=_revoke)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the key file")


def _create(arguments: argparse.Namespace) -> int:
    entries = read_key_file(arguments.file) if arguments.file.exists() else []
    key, digest = new_key()
    quotas = {
        name: getattr(arguments, name)
        for name in ("tokens_per_minute", "concurrent_requests")
        if getattr(arguments, name) is not None
    }
    entry: dict[str, Any] = {
        "sha256": digest,
        "name": arguments.name,
        "tenant": arguments.tenant,
        "models": arguments.model,
        "rights": arguments.right or ["generate"],
        "quotas": quotas,
        "expires": arguments.expires,
    }
    # Check the whole file, so that a name that exists is refused.
    known = [one.model_dump() for one in entries]
    _write(arguments.file, parse_keys({"keys": [*known, entry]}))
    print(key)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    for entry in read_key_file(arguments.file):
        quotas = entry.quotas.model_dump(exclude_none=True)
        details = [
            f"tenant {entry.tenant}",
            f"rights {', '.join(entry.rights)}",
            f"models {', '.join(entry.models) or 'all'}",
            *(f"{name} {value}" for name, value in quotas.items()),
            *([f"expires {entry.expires.isoformat()}"] if entry.expires else []),
        ]
        print(f"{entry.name}: {'; '.join(details)}")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    entries = read_key_file(arguments.file)
    left = [entry for entry in entries if entry.name != arguments.name]
    if len(left) == len(entries):
        known = ", ".join(entry.name for entry in entries) or "none"
        raise KeyFileError(
            f"{arguments.file}: no key has the name {arguments.name!r}; there are {known}"
        )
    _write(arguments.file, left)
    print(f"revoked {arguments.name}")
    return 0


def _write(path: Path, entries: list[KeyEntry]) -> None:
    try:
        write_key_file(path, entries)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be written: {error.strerror}") from None
