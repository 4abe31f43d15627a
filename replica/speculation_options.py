"""The section `speculation` of the engine's options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quire.replica.option_fields import option

SpeculationMethod = Literal["auto", "off", "ngram", "suffix", "draft_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options of speculative decoding: a step verifies drafted tokens. It changes no token of an answer."""

    method: SpeculationMethod = option(
        "off",
        "Where drafts come from. off: no drafts. ngram: the text that followed the last tokens at their most recent "
        "earlier place in the same request. suffix: as ngram, and otherwise recent answers to the same tenant. "
        "auto: as suffix, with the number of drafted tokens chosen by measured acceptance and measured step times, 0 "
        "where drafts do not pay. draft_model: the likeliest tokens of a second, smaller model, as many as pay. With "
        "ngram, suffix and auto, the field `prediction` of a request is the first source for that request.",
    )
    max_draft_tokens: int = option(
        8, "Maximum number of drafted tokens per request and step.", ge=1, le=64
    )
    draft_model: str | None = option(
        None,
        "The model that drafts tokens, for method draft_model: a checkpoint folder or a Hugging Face id. It has the "
        "vocabulary of the served model, and full attention in all layers.",
        min_length=1,
    )
    suffix_index_bytes: int = option(
        16 * 2**20,
        "Maximum size in bytes of the index over recent answers, for all tenants together. A tenant's answers are "
        "never drafts for another tenant.",
        ge=2**16,
        le=2**34,
    )


def conflicts(options: Any) -> Iterator[str]:
    """Yield the problems of options that are each within their bounds.

    Parameters
    ----------
    options
        An object with the attributes of `SpeculationOptions`.
    """
    if options.method == "draft_model" and options.draft_model is None:
        yield "speculation.draft_model is None; method 'draft_model' needs a checkpoint"
    elif options.method != "draft_model" and options.draft_model is not None:
        yield (
            f"speculation.draft_model ({options.draft_model!r}) is for the method draft_model only, got "
            f"method {options.method!r}"
        )
