"""Small tokenizers of the two families that matter, made here: no download. And the loop that real engines live in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# Tests run with --import-mode=importlib, which leaves their folder off the path.
sys.path.insert(0, str(Path(__file__).parent))

CORPUS = ["hello world, this is some text about cats and dogs 你好 😀 naïve café\n"] * 20


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<ünï>", special=False)])  # spelt as it is, not in bytes
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """Llama 2, Mistral: words with ▁, and byte tokens for what the vocabulary lacks."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("▁", "h"), ("▁", "w"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")]
    for token in [*"▁abcdefghilmnorstuwxyz\ufffd", *("".join(pair) for pair in merges)]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A SentencePiece tokenizer without byte fallback: neither of the two exact paths."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0)]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the module: its replicas live in it."""
    import torch  # only tests with real engines need it

    before = torch.get_num_threads()
    with asyncio.Runner() as runner:
        yield runner
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "numpy"])
def either_library(request, monkeypatch) -> str:
    """The router's compiled library, and none as where there was no compiler."""
    from quire.router import compiled_router

    if request.param == "numpy":
        monkeypatch.setattr(compiled_router, "load", lambda: None)
    elif compiled_router.load() is None:
        pytest.skip("installed without a C compiler")
    return request.param
