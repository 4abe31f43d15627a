"""The bytes of each message: a change of a declaration must not change them without a new `WIRE_VERSION`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.protos.adapter_ref import AdapterRef
from quire.protos.sampling_params import Grammar, SamplingParams
from quire.protos.wire import (
    AdapterReport,
    BlockSource,
    CacheEvents,
    Completion,
    Facts,
    Frame,
    Hello,
    Load,
    PromptLogprobs,
    PullHint,
    Submit,
    TokenDelta,
    TokenLogprob,
    TokenRecord,
)
from quire.protos.wire_codec import WIRE_VERSION, Message


def uint64(*values):
    return np.array(values, np.uint64)


def int32(*values):
    return np.array(values, np.int32)


def float32(*values):
    return np.array(values, np.float32)


PARAMS = SamplingParams(
    max_tokens=7,
    min_tokens=1,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    seed=2**64 - 1,
    choice=2,
    stop_token_ids=(5, 6),
    ignore_eos=True,
    min_p=0.1,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=2.0,
    logit_bias=((1, -2.5), (9, 100.0)),
    allowed_token_ids=(1, 2),
    bad_words=((3,), (4, 5)),
    logprobs=2,
    grammar=Grammar("regex", "a+", "grammar"),
    prompt_logprobs=1,
    prompt_logprobs_start=3,
    pooling="mean",
)
PROMPT = PromptLogprobs(
    1,
    int32(4, 5),
    float32(-0.5, -1.5),
    int32(1, 7),
    np.array([[4, 2], [8, 5]], np.int32),
    np.array([[-0.5, -1.0], [-0.25, -1.5]], np.float32),
)
MESSAGES: dict[str, Message] = {
    "submit": Submit(
        "router",
        2**40,
        "request",
        np.arange(3),
        PARAMS,
        1,
        "tenant",
        2.5,
        -3,
        17,
        64,
        True,
        2,
        "payer",
        1.5,
        AdapterRef("adapter", "/folder", "digest"),
        int32(4, 5),
        PullHint(BlockSource("10.0.0.1:5", "token"), 32, 640, 0.5),
    ),
    "short submit": Submit("r", 0, "", np.arange(0), SamplingParams()),
    "completion": Completion(
        "stop", 3, 4, 2, 0.5, 0.25, {"code": "internal", "message": "m"}, 1, 4096, 0.125
    ),
    "hello": Hello(
        "replica",
        "epoch",
        "model",
        "revision",
        "float32",
        1000,
        512,
        4096,
        32,
        [2, 3],
        {"load": 1.5},
        "node",
        "/flight",
        "cpu",
        4,
        8192,
        700,
        11,
        True,
        576,
        BlockSource("10.0.0.1:5", "token"),
        2048,
    ),
    "frame": Frame(
        "epoch",
        *Frame.pack(
            [
                TokenDelta(3, 5, [1, 2], Facts("stop", 4, 0.25, 1, 0.125)),
                TokenDelta(9, 0, [8], Facts()),
                TokenDelta(1, 0, [7], Facts(logprobs=[TokenLogprob(-0.5, [7, 8], [-0.5, -1.0])])),
                TokenDelta(2, 0, [], Facts(prompt_logprobs=PROMPT)),
                TokenDelta(
                    4, 1, [6], Facts(None, 0, 0.0, 0, 0.0, [TokenLogprob(-1.0, [], [])], PROMPT)
                ),
                TokenDelta(5, 0, [], Facts("stop", 2, embedding=float32(0.5, -2.0))),
            ],
            TokenRecord(uint64(2**40, 7), int32(0, 2**31 - 1), int32(151000, 0)),
        ),
        [CacheEvents(2, uint64(2**64 - 1), uint64(), True, uint64(3), uint64(4, 5))],
        2,
        2**64 - 1,
        Load(num_running=1, prefill_s_per_token=0.5, num_places=None, num_routers=3),
        uint64(1, 2),
        True,
        uint64(6),
        AdapterReport(3, uint64(2**64 - 1), uint64(2**64 - 1, 8), 2, 1, 0.5, 0.125),
    ),
    "frame of a decode step": Frame(
        "epoch", TokenRecord(uint64(2**40, 7), int32(0, 2**31 - 1), int32(151000, 0))
    ),
    "empty frame": Frame("e"),
}
BYTES = {
    "submit": (
        "dc00130aa6726f75746572cf0000010000000000a772657175657374c40c000000000100000002000000dc00"
        "150701cb3fe000000000000003cb3feccccccccccccdcfffffffffffffffff02920506c3cb3fb99999999999"
        "9acb3ff8000000000000cbbff0000000000000cb4000000000000000929201cbc0040000000000009209cb40"
        "590000000000009201029291039204050293a57265676578a2612ba76772616d6d61720103a46d65616e01a6"
        "74656e616e74cb4004000000000000fd1140c302a57061796572cb3ff800000000000093a761646170746572"
        "a72f666f6c646572a6646967657374c40804000000050000009492aa31302e302e302e313a35a5746f6b656e"
        "20cd0280cb3fe00000000000000fb34394"
    ),
    "short submit": (
        "dc00130aa17200a0c400dc00151000cb3ff000000000000000cb3ff0000000000000000090c2cb0000000000"
        "000000cb3ff0000000000000cb0000000000000000cb0000000000000000909090c0c0c001a000a0c000c0c0"
        "c200a0cb0000000000000000c0c0c099aad4d5"
    ),
    "completion": (
        "9b0aa473746f70030402cb3fe0000000000000cb3fd000000000000082a4636f6465a8696e7465726e616ca7"
        "6d657373616765a16d01cd1000cb3fc0000000000000b649a6b5"
    ),
    "hello": (
        "dc00170aa77265706c696361a565706f6368a56d6f64656ca87265766973696f6ea7666c6f61743332cd03e8"
        "cd0200cd10002092020381a46c6f6164cb3ff8000000000000a46e6f6465a72f666c69676874a363707504cd"
        "2000cd02bc0bc3cd024092aa31302e302e302e313a35a5746f6b656ecd080051dc36d7"
    ),
    "frame": (
        "9c0aa565706f636894c440030000000000000009000000000000000100000000000000020000000000000004"
        "00000000000000050000000000000000000000000100000700000000000000c4200500000000000000000000"
        "0000000000010000000000000000000000ffffff7fc41c0100000002000000080000000700000006000000d8"
        "4d020000000000c4240000000002000000030000000400000004000000050000000500000006000000070000"
        "009695a473746f7004cb3fd000000000000001cb3fc000000000000095c000cb000000000000000000cb0000"
        "00000000000096c000cb000000000000000000cb00000000000000009193cbbfe000000000000092070892cb"
        "bfe0000000000000cbbff000000000000097c000cb000000000000000000cb0000000000000000c0970102c4"
        "080400000005000000c4080100000007000000c41004000000020000000800000005000000c408000000bf00"
        "00c0bfc410000000bf000080bf000080be0000c0bf97c000cb000000000000000000cb000000000000000091"
        "93cbbff00000000000009090970102c4080400000005000000c4080100000007000000c41004000000020000"
        "000800000005000000c408000000bf0000c0bfc410000000bf000080bf000080be0000c0bf98a473746f7002"
        "cb000000000000000000cb0000000000000000c0c0c4080000003f000000c0919602c408ffffffffffffffff"
        "c400c3c4080300000000000000c4100400000000000000050000000000000002cfffffffffffffffffdc0019"
        "0100000000000000cb3fe0000000000000cb0000000000000000000000000000000000cb0000000000000000"
        "c003000000c41001000000000000000200000000000000c3c40806000000000000009703c408ffffffffffff"
        "ffffc410ffffffffffffffff08000000000000000201cb3fe0000000000000cb3fc0000000000000c51549cc"
    ),
    "frame of a decode step": (
        "9c0aa565706f636894c41000000000000100000700000000000000c40800000000ffffff7fc408d84d020000"
        "000000c090900000dc00190000000000000000cb0000000000000000cb000000000000000000000000000000"
        "0000cb0000000000000000c001000000c0c2c400c06f9f00c8"
    ),
    "empty frame": (
        "9c0aa165c090900000dc00190000000000000000cb0000000000000000cb0000000000000000000000000000"
        "000000cb0000000000000000c001000000c0c2c400c0288ee31b"
    ),
}


def test_the_version_is_that_of_the_bytes_below():
    assert WIRE_VERSION == 10


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_bytes_of_its_version(name: str):
    assert MESSAGES[name].encode().hex() == BYTES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_read_is_written_again_with_the_same_bytes(name: str):
    message = bytes.fromhex(BYTES[name])
    assert type(MESSAGES[name]).decode(message).encode() == message


def test_sampling_parameters_are_read_as_they_were_written():
    assert SamplingParams.from_wire(PARAMS.to_wire()) == PARAMS
    given = {field.name for field in dataclasses.fields(SamplingParams)}
    default = SamplingParams()
    assert all(getattr(PARAMS, name) != getattr(default, name) for name in given)
