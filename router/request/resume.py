"""Event ids: a client that has lost its router continues its stream at another router.

Every event of a stream carries an id (over HTTP, if the client asks for ids). To resume, the client sends the original
request with the last id that it received (HTTP: `Last-Event-ID`, gRPC: `resume_from`). The server keeps no state. The
answer is a function of the request and its seed, so any router generates it again, drops the tokens that the client
has, and continues with the next one. An id contains

```
 q1 . origin                                         . marks, one for each choice
      seed, fingerprint, answer's id, time (base64)     tokens - CRC-32 of their ids (hex), `!` when it has ended
```

* the *seed*, which the router chooses if the client gave none;
* the *fingerprint* of prompt, resolved parameters and model. The server refuses a request with another fingerprint:
  another request, or the same request at a server with another model or other defaults;
* the number of *tokens* of each choice that the client has, and their checksum. The regenerated tokens must match it.
  They may differ if the engine is not deterministic; then the client gets an error, never two halves of
  different answers.

Ids are not signed, because an id grants no access and refers to no state. With a forged id, a client gets a part of the
answer that it would also get by sending the request with that `seed`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import struct
import zlib
from collections.abc import Sequence

import msgpack
import numpy as np

from quire.protos.errors import InvalidRequest
from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Hello
from quire.router.types import GenerationRequest, Mark, Origin, OutputDelta, ResumePoint

_ORIGIN = struct.Struct("<Q8s16sI")  # seed, fingerprint, answer's id, Unix seconds
_MARK = re.compile(r"(?:([0-9a-f]{1,8})-([0-9a-f]{1,8})(!?))?")
_ID = re.compile(r"q1\.([A-Za-z0-9_-]{48})\.([0-9a-f!,-]{0,1024})")


class EventIds:
    """Makes the ids of one stream's events, in order.

    Parameters
    ----------
    origin
        Seed, fingerprint, answer's id and time of the stream.
    marks
        For each choice, the part of the answer that the client has when the stream starts.
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
        """Return the id of an event before a choice's first token: the role, the echoed prompt."""
        self._marks[choice] = "0-0"
        return self._id()

    def after(self, delta: OutputDelta) -> str:
        """Return the id of the event with this delta. Call it for every delta, also for one without an event."""
        choice, token_ids = delta.choice, delta.token_ids
        checksum = checksum_of(token_ids, self._checksums[choice])
        num_tokens = self._num_tokens[choice] + len(token_ids)
        self._checksums[choice], self._num_tokens[choice] = checksum, num_tokens
        mark = "%x-%x" % (num_tokens, checksum)  # noqa: UP031 - takes half the time of an f-string
        self._marks[choice] = mark if delta.finish_reason is None else mark + "!"
        return self._id()

    def _id(self) -> str:
        return self._head + ",".join(self._marks)


class KnownPrefix:
    """Checks the tokens of a resumed choice that the client has. They are generated again, checked and dropped.

    Parameters
    ----------
    mark
        Number and checksum of these tokens.
    field
        Name of the request's field with the event id, for errors.
    """

    def __init__(self, mark: Mark, field: str):
        self._mark = mark
        self._field = field
        self._checksum = 0

    def take(self, start: int, token_ids: list[int]) -> int:
        """Return how many of these tokens the client has. Their first output index is `start`.

        Raises
        ------
        InvalidRequest
            The last of the client's tokens has been generated again, and the checksum differs.
        """
        num_known = min(len(token_ids), max(0, self._mark.num_tokens - start))
        if num_known:
            self._checksum = checksum_of(token_ids[:num_known], self._checksum)
            if start + num_known == self._mark.num_tokens and self._checksum != self._mark.checksum:
                raise InvalidRequest(
                    f"{self._field}: the first {self._mark.num_tokens} tokens of the answer, generated again, differ "
                    "from the tokens before this id; the stream cannot be continued exactly",
                    field=self._field,
                )
        return num_known

    def check_end(self, num_tokens: int) -> None:
        """Raise `InvalidRequest` if an answer of `num_tokens` tokens is shorter than the part that the client has."""
        if num_tokens < self._mark.num_tokens:
            raise InvalidRequest(
                f"{self._field}: the answer has {num_tokens} tokens, but this id follows token {self._mark.num_tokens}",
                field=self._field,
            )


def parse(text: str, field: str) -> ResumePoint:
    """Parse an event id.

    Parameters
    ----------
    text
        The id as the client sent it.
    field
        Name of the request's field with the id, for errors.

    Raises
    ------
    InvalidRequest
        `text` is not an event id.
    """
    match = _ID.fullmatch(text)
    marks = [_parse_mark(mark) for mark in match[2].split(",")] if match else []
    if match is None or None in marks:
        raise InvalidRequest(
            f"{field} must be the id of an event of this API's streams, unchanged, got {text[:64]!r}",
            field=field,
        )
    seed, fingerprint, answer_id, created_s = _ORIGIN.unpack(base64.urlsafe_b64decode(match[1]))
    return ResumePoint(
        Origin(seed, fingerprint, answer_id.hex(), created_s),
        tuple(mark for mark in marks if mark is not None),
        field,
    )


def check(point: ResumePoint, fingerprint: bytes, num_choices: int, max_tokens: int) -> None:
    """Check that an id belongs to its request.

    Raises
    ------
    InvalidRequest
        The id belongs to another request, or is outside this request's bounds.
    """
    if point.origin.fingerprint != fingerprint:
        raise InvalidRequest(
            f"{point.field}: this id belongs to another request; prompt, parameters, seed and model must equal "
            "those of the first request",
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
    """Return 8 bytes that differ for requests with different answers. Not safe against deliberate collisions.

    Parameters
    ----------
    prompt_ids
        [tokens] int32.
    hashes
        [tokens // 64] uint64, the prompt's routing hashes. The last one covers all whole blocks, so a long prompt is
        not read again.
    sampling
        The resolved parameters, with the seed.
    text_options
        Further options that change the text, such as stop strings; plain data.
    hello
        The hello of a replica of the model.
    """
    tail = np.ascontiguousarray(prompt_ids[len(hashes) * ROUTING_BLOCK_TOKENS :], dtype="<i4")
    grammar = sampling.grammar
    facts = [
        [hello.model_name, hello.revision, hello.dtype],
        [len(prompt_ids), int(hashes[-1]) if len(hashes) else 0, tail.tobytes()],
        # The grammar without its field's name, which differs between HTTP and gRPC.
        [None if value is grammar else value for value in sampling.to_wire()],
        None if grammar is None else [grammar.kind, grammar.text],
        list(text_options),
    ]
    return hashlib.blake2b(msgpack.packb(facts), digest_size=8, person=b"quire-resume").digest()


def checksum_of(token_ids: Sequence[int], before: int = 0) -> int:
    """Return the CRC-32 of token ids (4 bytes each, little endian), continued from the checksum `before`."""
    for token_id in token_ids:
        before = zlib.crc32(token_id.to_bytes(4, "little"), before)
    return before


def _parse_mark(text: str) -> Mark | None:
    match = _MARK.fullmatch(text)
    if match is None:
        return None
    if not match[0]:
        return Mark()
    return Mark(int(match[1], 16), int(match[2], 16), begun=True, finished=bool(match[3]))


def _text(mark: Mark) -> str:
    if not mark.begun:
        return ""
    return f"{mark.num_tokens:x}-{mark.checksum:x}{'!' if mark.finished else ''}"


def with_seed(request: GenerationRequest) -> GenerationRequest:
    """Add the seed of the resumed stream, if the client gave none."""
    if request.resume_from is None or request.seed is not None:
        return request
    return dataclasses.replace(request, seed=request.resume_from.origin.seed)
