"""Reads the slots of another node's pool by NIXL, without a copy in between: RDMA, or TCP where there is none.

```
 lender   leases slots ─── gRPC: headers, numbers of slots ───▶ importer
          its pool ═══════════════ NIXL: read ════════════════▶ claimed slots of its own pool
```

NIXL (`quire[nixl]`) is imported by the first object of this class. It needs no GPU: a pool is in host memory.

NIXL's own thread for progress takes a whole core, also when nothing moves. So it is off. A reader makes progress while
it waits, and so does a thread here, while slots are lent: over TCP a read needs the lender's help.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Other nodes' agents that are remembered; the least recently used one is forgotten first.
_MAX_AGENTS = 16
_POLL_S = 0.0001
# A read of a piece, about 1 MiB, that takes longer will not end. UCX finds out that a peer is dead in less.
_STUCK_S = 60.0
# Memory of the host, in NIXL's words.
_HOST_MEMORY = "DRAM"


class NixlMissingError(ValueError):
    """The package is not installed, or does not work on this machine."""


class NixlError(Exception):
    """A read has failed, and will write nothing any longer."""


class NixlStuckError(NixlError):
    """A read does not end, so it may still write to the own slots. They must not be used again."""


class LenderAddress(NamedTuple):
    """What a process needs to read another one's slots."""

    agent: bytes  # NIXL's metadata
    begin: int  # address of slot 0 in the lender


class NixlMemory:
    """The slots of this node's pool as memory of NIXL. Any thread may call it.

    Parameters
    ----------
    slots
        [num_slots, slot_bytes] uint8, the pool's mapped memory.

    Raises
    ------
    NixlMissingError
        See there.
    """

    def __init__(self, slots: np.ndarray):
        try:
            from nixl import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise NixlMissingError(
                f"peer_transport is nixl, and the package cannot be imported ({error}); install quire[nixl]"
            ) from error
        self._slots = slots  # keeps the mapping
        self._begin, self._slot_bytes = slots.ctypes.data, slots.shape[1]
        self._lock = threading.Lock()
        # Metadata of another node's agent to its name.
        self._agents: OrderedDict[bytes, str] = OrderedDict()
        try:
            options = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl_agent(uuid.uuid4().hex, options)
            self._registered = self._agent.register_memory(
                [(self._begin, slots.nbytes, 0, "")], _HOST_MEMORY
            )
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no class in common.
            raise NixlMissingError(
                f"peer_transport is nixl, and NIXL cannot start: {error}"
            ) from error
        self.address = LenderAddress(metadata, self._begin)
        self._num_loans, self._is_lending = 0, threading.Event()
        self._helper = threading.Thread(target=self._help, name="quire-nixl", daemon=True)
        self._helper.start()

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Help those who read slots of this node, until the end of the block."""
        with self._lock:
            self._num_loans += 1
            self._is_lending.set()
        try:
            yield
        finally:
            with self._lock:
                self._num_loans -= 1
                if not self._num_loans:
                    self._is_lending.clear()

    def _help(self) -> None:
        while True:
            self._is_lending.wait()
            with self._lock:
                if self._agent is None:
                    return
                self._agent.get_new_notifs()
            time.sleep(_POLL_S)

    def read(
        self,
        lender: LenderAddress,
        lent: Sequence[int],
        own: Sequence[int],
    ) -> None:
        """Copy slots of a lender into slots that this node has claimed. A read cannot be interrupted.

        Parameters
        ----------
        lent, own
            The slots there and here, equally many. The lender holds leases of its slots meanwhile.

        Raises
        ------
        NixlError
            The lender has gone, or its memory. The own slots have any bytes.
        NixlStuckError
            See there.
        """
        end_s, handle = time.monotonic() + _STUCK_S, None
        try:
            with self._lock:
                name = self._connect(lender.agent)
                here = self._descriptors(self._begin, own)
                there = self._descriptors(lender.begin, lent)
                handle = self._agent.initialize_xfer("READ", here, there, name)
                state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > end_s:
                    handle = None  # giving it back would wait
                    raise NixlStuckError(f"a read takes more than {_STUCK_S:g} s")
                time.sleep(_POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise NixlError(f"the read ended as {state}")
        except NixlError:
            raise
        except Exception as error:
            with self._lock:
                self._forget(lender.agent)
            raise NixlError(f"{type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                with self._lock, contextlib.suppress(Exception):
                    self._agent.release_xfer_handle(handle)

    def _descriptors(self, begin: int, slots: Sequence[int]) -> Any:
        size = self._slot_bytes
        places = [(begin + slot * size, size, 0) for slot in slots]
        return self._agent.get_xfer_descs(places, _HOST_MEMORY)

    def _connect(self, metadata: bytes) -> str:
        """The name of another node's agent, which is added if it is new."""
        name = self._agents.pop(metadata, None)
        if name is None:
            added = self._agent.add_remote_agent(metadata)
            name = added.decode() if isinstance(added, bytes) else added
        self._agents[metadata] = name
        if len(self._agents) > _MAX_AGENTS:
            self._forget(next(iter(self._agents)))
        return name

    def _forget(self, metadata: bytes) -> None:
        name = self._agents.pop(metadata, None)
        if name is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def close(self) -> None:
        """Forget all agents, and give the memory back. Reads have ended."""
        with self._lock:
            for metadata in list(self._agents):
                self._forget(metadata)
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered)
            self._agent = None
            self._is_lending.set()
        self._helper.join()
