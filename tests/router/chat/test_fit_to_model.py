"""Requests of agents, which send the same effort to every model, are not refused for it."""

from __future__ import annotations

import pytest

from quire.protos.errors import UnsupportedField
from quire.replica.builtin_model import CHECKPOINT
from quire.router.chat.chat_format import ChatFormat
from quire.router.chat.tool_checks import EFFORTS
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import TextTokenizer
from quire.router.types import GenerationRequest

USER = ({"role": "user", "content": "hi"},)
HARMONY = "{{ reasoning_effort }}<|channel|>analysis<|message|><|end|><|channel|>commentary"


def variables(source: str, effort: str, *, fit_to_model: bool) -> dict[str, object]:
    chat = ChatFormat(ChatTemplate(source), TextTokenizer.load(CHECKPOINT))
    request = GenerationRequest(
        request_id="r", messages=USER, reasoning_effort=effort, fit_to_model=fit_to_model
    )
    return chat.variables(request)


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_template_without_a_switch_ignores_the_effort(effort):
    assert variables("{{ messages }}", effort, fit_to_model=True) == {}


def test_without_it_such_a_template_refuses_the_effort():
    with pytest.raises(UnsupportedField, match="does not control reasoning"):
        variables("{{ messages }}", "high", fit_to_model=False)


def test_the_nearest_effort_of_the_template_is_taken():
    found = [variables(HARMONY, effort, fit_to_model=True) for effort in EFFORTS]
    assert [value["reasoning_effort"] for value in found] == [
        *("low", "low", "low", "medium", "high", "high")
    ]
    with pytest.raises(UnsupportedField, match="has no such effort"):
        variables(HARMONY, "none", fit_to_model=False)
