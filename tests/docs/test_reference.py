"""The generated tables of the documentation are what the schemas in the code say."""

from __future__ import annotations

import runpy

import pytest

from quire.cluster.config.app_config import AppConfig
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from tests.docs.documents import ROOT

REFERENCE = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))
EMPTY = REFERENCE["BEGIN"] + REFERENCE["END"]


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_a_page_is_current(name: str):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == REFERENCE["page"](name, text), "run `make reference`"


def test_every_field_of_the_configuration_is_on_its_page():
    page = REFERENCE["page"]("configuration.md", EMPTY)

    def check(model):
        for name, info in model.model_fields.items():
            if section := REFERENCE["_section"](info):
                check(section)
            else:
                assert f"| `{name}` |" in page

    check(AppConfig)


def test_every_field_of_a_request_is_on_its_page():
    page = REFERENCE["page"]("api.md", EMPTY)
    for field in {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}:
        assert page.count(f"| `{field}` |") in (1, 2)


def test_a_page_that_is_out_of_date_is_found():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    old = text.replace("| `device` |", "| `devices` |")
    assert old != text and REFERENCE["page"]("configuration.md", old) == text
