"""A key file with one key of each kind, and the access control over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.cluster.auth.access_control import AccessControl
from quire.cluster.auth.key_file import new_key
from quire.cluster.auth.key_ring import KeyRing
from quire.cluster.auth.request_bill import Ledger
from quire.cluster.auth.tenant_counters import TenantCounters


@dataclass
class Lines:
    """Stands in for `UsageLog`."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def put(self, make_line: Callable[[], dict[str, Any]]) -> None:
        self.lines.append(make_line())

    def close(self) -> None: ...


@dataclass
class Keys:
    """Keys by name, and their file."""

    path: Path
    secrets: dict[str, str] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    now_s: float = 0.0
    num_routers: int = 1
    usage: Lines = field(default_factory=Lines)

    def add(self, name: str, *rights: str, tenant: str = "team-a", **more: Any) -> str:
        secret, digest = new_key()
        self.secrets[name] = secret
        entry = {"sha256": digest, "name": name, "tenant": tenant, "rights": list(rights)}
        self.entries.append(entry | more)
        self.write()
        return secret

    def write(self) -> None:
        self.path.write_text(json.dumps({"keys": self.entries}))

    def ring(self, max_labels: int = 50, **options: Any) -> KeyRing:
        return KeyRing(self.path, max_labels=max_labels, **options)

    def access(self, **options: Any) -> AccessControl:
        ledger = Ledger(
            counters=TenantCounters(),
            log=self.usage,
            num_routers=lambda: self.num_routers,
            clock=lambda: self.now_s,
        )
        return AccessControl(self.ring(**options), ledger)

    def header(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[name]}"}


def one_of_each_kind(folder: Path) -> Keys:
    """A file with a key of each right, and one of another tenant."""
    made = Keys(folder / "keys.json")
    made.add("generate", "generate")
    made.add("observe", "observe")
    made.add("admin", "admin", tenant="ops")
    made.add("other", "generate", "observe", tenant="team-b")
    return made
