"""Event ids: how a client that has lost its router continues its stream at another one.

Every event of a stream carries an id, over HTTP if the client asks for ids; the client sends the last one it got along
with the original request (HTTP: `Last-Event-ID`, gRPC: `resume_from`). The server keeps no state for that. The answer
is a function of the request and its seed, so any router has it generated again, drops what the client has, and goes on
with the next token. An id therefore says

```
 q1 . origin                                         . marks, one for each choice
      seed, fingerprint, answer's id, time (base64)     tokens - CRC-32 of their ids (hex), `!` when it has ended
```

* the *seed*, since the router draws one where the client gave none;
* the *fingerprint* of prompt, resolved parameters and model: another request, or a server whose model or defaults have
  changed since, is refused instead of spliced onto the first half of something else;
* how many *tokens* of each choice the client has, and their checksum: what is generated again must be that, which
  it may not be where the engine is not deterministic (DESIGN §6.2). Then the client gets an error, never two
  halves of different answers.

It is not signed. An id gives no right and names no state: whoever writes one himself gets what the same request with
that `seed` gives anybody, cut at a place of his choice. So there is nothing to protect, and no key to distribute.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import zlib
from collections.abc import Sequence

import msgpack
import numpy as np

from quire.protos.errors import InvalidRequest
from quire.protos.wire import ROUTING_BLOCK_TOKENS, Hello, SamplingParams
from quire.router.types import Mark, Origin, OutputDelta, ResumePoint

_ORIGIN = struct.Struct("<Q8s16sI")  # seed, fingerprint, answer's id, Unix seconds
_MARK = re.compile(r"(?:([0-9a-f]{1,8})-([0-9a-f]{1,8})(!?))?")
_ID = re.compile(r"q1\.([A-Za-z0-9_-]{48})\.([0-9a-f!,-]{0,1024})")


class EventIds:
    """The ids of one stream's events, in order.

    Parameters
    ----------
    origin
        The stream's.
    marks
        What the client has of each choice when the stream begins.
    """

    def __init__(self, origin: Origin, marks: Sequence[Mark]):
        packed = _ORIGIN.pack(
            origin.seed, origin.fingerprint, bytes.fromhex(origin.answer_id), origin.created_s
        )
        self._head = f"q1.{base64.urlsafe_b64encode(packed).decode()}."
        self._num_tokens = [mark.num_tokens for mark in marks]
        self._checksums = [mark.checksum for mark in marks]
        self._marks = [_text(mark) for mark in marks]

    def begin(self, choice: int) -> str:
        """The id of what comes before a choice's first token: the role, the echoed prompt."""
        self._marks[choice] = "0-0"
        return self._id()

    def after(self, delta: OutputDelta) -> str:
        """The id of the event with this delta; call it for each, also for one that has no event."""
        choice, token_ids = delta.choice, delta.token_ids
        checksum = checksum_of(token_ids, self._checksums[choice])
        num_tokens = self._num_tokens[choice] + len(token_ids)
        self._checksums[choice], self._num_tokens[choice] = checksum, num_tokens
        mark = "%x-%x" % (num_tokens, checksum)  # noqa: UP031 - half the time of an f-string
        self._marks[choice] = mark if delta.finish_reason is None else mark + "!"
        return self._id()

    def _id(self) -> str:
        return self._head + ",".join(self._marks)


class KnownPrefix:
    """What the client of a resumed choice has: to be dropped when it is generated again, and checked.

    Parameters
    ----------
    mark
        Its tokens.
    field
        Where the client gave the id, for errors.
    """

    def __init__(self, mark: Mark, field: str):
        self._mark = mark
        self._field = field
        self._checksum = 0

    def take(self, start: int, token_ids: list[int]) -> int:
        """How many of these tokens, the first of which has the index `start`, the client has.

        Raises
        ------
        InvalidRequest
            All that the client has is there, and it is something else.
        """
        num_known = min(len(token_ids), max(0, self._mark.num_tokens - start))
        if num_known:
            self._checksum = checksum_of(token_ids[:num_known], self._checksum)
            if start + num_known == self._mark.num_tokens and self._checksum != self._mark.checksum:
                raise InvalidRequest(
                    f"{self._field}: generated again, the first {self._mark.num_tokens} tokens are not "
                    "those that this id was given for; the stream cannot be continued exactly",
                    field=self._field,
                )
        return num_known

    def check_end(self, num_tokens: int) -> None:
        """Raise `InvalidRequest` when an answer of so many tokens is shorter than what the client has."""
        if num_tokens < self._mark.num_tokens:
            raise InvalidRequest(
                f"{self._field}: the answer has {num_tokens} tokens, this id says that "
                f"{self._mark.num_tokens} of them were sent",
                field=self._field,
            )


def parse(text: str, field: str) -> ResumePoint:
    """Read an event id.

    Parameters
    ----------
    text
        What the client sent.
    field
        Where, for errors.

    Raises
    ------
    InvalidRequest
        It is none.
    """
    match = _ID.fullmatch(text)
    marks = [_MARK.fullmatch(mark) for mark in match[2].split(",")] if match else [None]
    if match is None or None in marks:
        raise InvalidRequest(
            f"{field} must be the id of an event of this API's streams, as it was sent, got {text[:64]!r}",
            field=field,
        )
    seed, fingerprint, answer_id, created_s = _ORIGIN.unpack(base64.urlsafe_b64decode(match[1]))
    return ResumePoint(
        Origin(seed, fingerprint, answer_id.hex(), created_s),
        tuple(
            Mark(int(mark[1], 16), int(mark[2], 16), True, bool(mark[3])) if mark[0] else Mark()
            for mark in marks
        ),
        field,
    )


def check(point: ResumePoint, fingerprint: bytes, num_choices: int, max_tokens: int) -> None:
    """Refuse an id that does not belong to the request it came with.

    Raises
    ------
    InvalidRequest
        The request is another one, or the id does not fit its bounds.
    """
    if point.origin.fingerprint != fingerprint:
        raise InvalidRequest(
            f"{point.field}: this id belongs to another request; prompt, parameters, seed and model have "
            "to be those of the first one",
            field=point.field,
        )
    if len(point.marks) != num_choices:
        raise InvalidRequest(
            f"{point.field} must have {num_choices} marks, one for each choice, got {len(point.marks)}",
            field=point.field,
        )
    most = max(mark.num_tokens for mark in point.marks)
    if most > max_tokens:
        raise InvalidRequest(
            f"{point.field} must be at most {max_tokens} tokens into the answer, got {most}",
            field=point.field,
        )


def fingerprint_of(
    prompt_ids: np.ndarray,
    hashes: np.ndarray,
    sampling: SamplingParams,
    text_options: Sequence[object],
    hello: Hello,
) -> bytes:
    """8 bytes that are others for a request with another answer; not for requests made to collide.

    Parameters
    ----------
    prompt_ids
        [tokens] int32.
    hashes
        [tokens // 64] uint64, the prompt's routing hashes: the last one stands for all whole blocks, so that
        a long prompt is not read again.
    sampling
        Resolved, with the seed.
    text_options
        What else decides about the text: stop strings and the like, plain data.
    hello
        Names the model.
    """
    tail = np.ascontiguousarray(prompt_ids[len(hashes) * ROUTING_BLOCK_TOKENS :], dtype="<i4")
    grammar = sampling.grammar
    facts = [
        [hello.model_name, hello.revision, hello.dtype],
        [len(prompt_ids), int(hashes[-1]) if len(hashes) else 0, tail.tobytes()],
        # The grammar without the name of the field it came in: the same over both APIs.
        [None if value is grammar else value for value in sampling.to_wire()],
        None if grammar is None else [grammar.kind, grammar.text],
        list(text_options),
    ]
    return hashlib.blake2b(msgpack.packb(facts), digest_size=8, person=b"quire-resume").digest()


def checksum_of(token_ids: Sequence[int], before: int = 0) -> int:
    """CRC-32 of token ids, 4 bytes each, little endian, continued from that of those before them."""
    for token_id in token_ids:
        before = zlib.crc32(token_id.to_bytes(4, "little"), before)
    return before


def _text(mark: Mark) -> str:
    if not mark.begun:
        return ""
    return f"{mark.num_tokens:x}-{mark.checksum:x}{'!' if mark.finished else ''}"
