"""The key file: which keys exist, what each may do, and its quotas.

The file has JSON or YAML: `{"keys": [KeyEntry, ...]}`. It holds SHA-256 digests, not keys. A key has 256 random bits,
so its digest cannot be inverted, and needs neither salt nor a slow hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from quire.cluster.auth.access_rules import Right
from quire.protos.unique_keys import parse_json, parse_yaml

# About 4,000 keys. Parsing this much JSON holds the interpreter for about 10 ms.
MAX_FILE_BYTES = 1 << 20
_PREFIX = "sk-quire-"
_RIGHTS = {right.value: right for right in (Right.GENERATE, Right.OBSERVE, Right.ADMIN)}
# Neither `/`, which separates a tenant from a cache salt, nor characters that change a log line. (`$` of this engine is
# the very end.)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class KeyFileError(ValueError):
    """The key file cannot be used. The message names the entry and the field, never a digest."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Quotas(_Part):
    """Bounds on the use of one key, over all routers; None: no bound."""

    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    concurrent_requests: int | None = Field(default=None, ge=1, le=10**6)


class KeyEntry(_Part):
    """One key."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    name: Name
    tenant: Name
    models: list[str] = []
    rights: list[Literal["generate", "observe", "admin"]] = Field(min_length=1)
    quotas: Quotas = Quotas()
    expires: Annotated[AwareDatetime, Field(strict=False)] | None = None

    @property
    def digest(self) -> bytes:
        """The 32 bytes of `sha256`."""
        return bytes.fromhex(self.sha256)

    def all_rights(self) -> frozenset[Right]:
        """Return the rights with those that they include: `admin` includes all."""
        if "admin" in self.rights:
            return frozenset((Right.ANY_KEY, *_RIGHTS.values()))
        return frozenset((Right.ANY_KEY, *(_RIGHTS[name] for name in self.rights)))


def read_key_file(path: Path) -> list[KeyEntry]:
    """Read and check a key file.

    Raises
    ------
    KeyFileError
        It cannot be read, or an entry is wrong; names every wrong field.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise KeyFileError(f"{path}: must have at most {MAX_FILE_BYTES} bytes, has more")
    try:
        return parse_keys(_decoded(raw))
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def parse_keys(data: Any) -> list[KeyEntry]:
    """Check the content of a key file.

    Raises
    ------
    KeyFileError
        Names every wrong field, and names and digests that are given twice.
    """
    if not isinstance(data, dict) or data.keys() != {"keys"} or not isinstance(data["keys"], list):
        raise KeyFileError("must be a mapping with the only field keys, a list")
    entries: list[KeyEntry] = []
    problems: list[str] = []
    for i, item in enumerate(data["keys"]):
        try:
            entries.append(KeyEntry.model_validate(item))
        except ValidationError as error:
            # Without the values, which may be keys.
            for problem in error.errors(include_input=False, include_url=False):
                where = "".join(f".{part}" for part in problem["loc"])
                problems.append(f"keys[{i}]{where}: {problem['msg']}")
    for field in ("name", "sha256"):
        first: dict[str, str] = {}
        for entry in entries:
            value = getattr(entry, field)
            if value in first:
                problems.append(f"keys {first[value]!r} and {entry.name!r} have the same {field}")
            first.setdefault(value, entry.name)
    if problems:
        raise KeyFileError("; ".join(problems))
    return entries


def _decoded(raw: bytes) -> Any:
    try:
        text = raw.decode()
        return parse_json(text) if text.lstrip().startswith("{") else parse_yaml(text)
    except UnicodeDecodeError:
        raise KeyFileError("must be UTF-8") from None
    except json.JSONDecodeError as error:
        raise KeyFileError(f"not valid JSON: line {error.lineno}: {error.msg}") from None
    except ValueError:
        # Without the name, which may be a key in the wrong place.
        raise KeyFileError("not valid JSON: an object has the same name twice") from None
    except yaml.YAMLError as error:
        # The error's text quotes the file, so the message has only the line.
        mark = getattr(error, "problem_mark", None)
        where = f": line {mark.line + 1}" if mark else ""
        raise KeyFileError(f"not valid YAML{where}") from None


def new_key() -> tuple[str, str]:
    """Return a new key and its digest in hexadecimal."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


def write_key_file(path: Path, entries: list[KeyEntry]) -> None:
    """Replace a key file at once, so that readers see the old or the new one; only its owner may read it."""
    data = {"keys": [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]}
    target = path.resolve()
    # `mkstemp` makes files with mode 0600.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
