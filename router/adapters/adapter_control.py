"""Loads and unloads adapters on all replicas and tells the other routers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from quire.protos.adapter_ref import AdapterRef, cache_namespace
from quire.protos.errors import InvalidRequest, QuireError, model_not_found
from quire.router.adapters.adapter_registry import AdapterRegistry, PlainEntry
from quire.router.status_types import AdapterEntry
from quire.router.types import GenerationRequest

_MAX_NAME_BYTES = 256


class AdapterReplicas(Protocol):
    """The methods by which adapters reach replicas. `transport.bus.Bus` implements them."""

    async def load_adapter(self, ref: AdapterRef) -> list[QuireError]:
        """Let every replica read an adapter; return the errors of those that cannot use it."""
        ...

    async def forget_adapter(self, digest: str) -> None:
        """Let every replica free the memory of an adapter."""
        ...


# Sends entries to all routers and returns theirs.
Exchange = Callable[[list[PlainEntry]], Awaitable[list[list[PlainEntry]]]]


async def _exchange_with_none(entries: list[PlainEntry]) -> list[list[PlainEntry]]:
    return []


class AdapterControl:
    """The adapters of an application, as one router changes them.

    Parameters
    ----------
    model_name
        The model's own name, which no adapter may have.
    replicas
        All replicas; None: there are none.
    exchange
        Reaches the other routers; None: there is no other.
    folder
        Folder in which adapters must lie that are loaded at run time; None: none is.
    """

    def __init__(
        self,
        model_name: str,
        replicas: AdapterReplicas | None = None,
        exchange: Exchange | None = None,
        folder: Path | None = None,
    ):
        self.registry = AdapterRegistry()
        self._model_name = model_name
        self._replicas = replicas
        self._exchange = exchange or _exchange_with_none
        self._folder = folder

    def declare(self, refs: Sequence[AdapterRef], since_ns: int = 1) -> None:
        """Add the adapters of the configuration. Later changes of their names count more."""
        for ref in refs:
            self.registry.put(ref, since_ns)

    async def load(self, name: str, path: str) -> AdapterEntry:
        """Load an adapter on all replicas under a name; it replaces the adapter that had the name.

        Raises
        ------
        InvalidRequest
            The name or the folder cannot be used.
        """
        self._check_name(name)
        folder = self._inside(path)
        try:
            ref = await asyncio.to_thread(AdapterRef.of_folder, name, str(folder))
        except OSError as error:
            raise InvalidRequest(f"path: {error}", field="path") from error
        errors = [] if self._replicas is None else await self._replicas.load_adapter(ref)
        if errors:
            raise errors[0]
        before = self.registry.find(name)
        entry = self.registry.put(ref, time.time_ns())
        await self.exchange()
        if before is not None:
            await self._forget(before)
        return entry

    async def unload(self, name: str) -> None:
        """Remove an adapter from all routers and replicas; requests that run keep it.

        Raises
        ------
        ModelNotFound
            No adapter has this name.
        """
        ref = self.registry.remove(name, time.time_ns())
        await self.exchange()
        await self._forget(ref)

    async def exchange(self) -> None:
        """Tell all routers the own entries, and take over theirs."""
        for entries in await self._exchange(self.registry.plain()):
            self.registry.merge(entries)

    async def _forget(self, ref: AdapterRef) -> None:
        if self._replicas is not None and not self.registry.uses(ref.digest):
            await self._replicas.forget_adapter(ref.digest)

    def _check_name(self, name: str) -> None:
        num_bytes = len(name.encode("utf-8", "surrogatepass"))
        if not 1 <= num_bytes <= _MAX_NAME_BYTES or not name.isprintable():
            raise InvalidRequest(
                f"name must be 1 to {_MAX_NAME_BYTES} bytes of printable characters, got {num_bytes} bytes",
                field="name",
            )
        if name == self._model_name:
            raise InvalidRequest(f"name must differ from the model's, {name!r}", field="name")

    def _inside(self, path: str) -> Path:
        """Return the folder of a path below `folder`."""
        if self._folder is None:
            raise InvalidRequest(
                "path: adapter_folder is not configured, so no adapter can be loaded at run time",
                field="path",
            )
        root = self._folder.resolve()
        try:
            found = (root / path).resolve()
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"path: {error}", field="path") from error
        if not found.is_relative_to(root) or found == root:
            raise InvalidRequest(f"path must be below {root} (adapter_folder)", field="path")
        return found


class AdapterMethods:
    """The methods of a `Service` that concern adapters."""

    adapter_control: AdapterControl

    def adapters(self) -> list[AdapterEntry]:
        """See `Service`."""
        return self.adapter_control.registry.loaded()

    async def load_adapter(self, name: str, path: str) -> AdapterEntry:
        """See `Service`."""
        return await self.adapter_control.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """See `Service`."""
        await self.adapter_control.unload(name)

    @staticmethod
    def namespace(request: GenerationRequest) -> str:
        """The scope of a request's cache entries: its tenant and its adapter."""
        return cache_namespace(request.tenant, request.adapter)

    def with_adapter(self, request: GenerationRequest, model_name: str) -> GenerationRequest:
        """Return the request with the adapter that it names as its model.

        Raises
        ------
        ModelNotFound
            It names neither the model nor an adapter.
        """
        if request.model in (None, model_name):
            return request
        registry = self.adapter_control.registry
        ref = registry.find(request.model or "")
        if ref is None:
            names = [model_name, *(entry.ref.name for entry in registry.loaded())]
            raise model_not_found(request.model, names)
        return dataclasses.replace(request, adapter=ref)
