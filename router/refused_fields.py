"""Fields of OpenAI's and vLLM's APIs that this server refuses, each with the sentence of its error.

There is a table for each object with such fields: the body of an endpoint, a message, a part of a message's content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.protos.errors import UnsupportedField, described

NO_TOOLS = "tool calls are not served"
NO_FUNCTIONS = "functions are served as tools only"
_NO_BEAMS = "beam search is not served"
_NO_REASONING = "reasoning is not controlled by the request"
_NO_AUDIO = "audio is not served"
_NO_IMAGES = "images are not served"
_NO_VIDEO = "videos are not served"
_NO_FILES = "files are not served"


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that this server refuses.

    Attributes
    ----------
    accepted
        Values that would change nothing, besides null; a field with such a value is ignored.
    """

    sentence: str
    accepted: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Return whether a value changes nothing, so the field can be ignored."""
        # In JSON, true is not 1.
        return value is None or any(
            value == known and isinstance(value, bool) == isinstance(known, bool)
            for known in self.accepted
        )

    def error(self, field: str, value: Any) -> UnsupportedField:
        """Return the error for a value.

        Parameters
        ----------
        field
            Path of the field in the request, such as ``messages[0].tool_calls``.
        """
        allowed = " or ".join([*map(json.dumps, self.accepted), "null"])
        return UnsupportedField(
            f"{self.sentence}: {field} must be {allowed}, got {described(value)}", field=field
        )


def _renamed(name: str) -> Refused:
    return Refused(f"this server calls the field {name}")


_OF_BOTH: Mapping[str, Refused] = {
    "detokenize": Refused("answers without text are not served", (True,)),
    "guided_choice": _renamed("structured_outputs.choice"),
    "guided_decoding_backend": Refused("the server chooses how grammars are compiled"),
    "guided_grammar": _renamed("structured_outputs.grammar"),
    "guided_json": _renamed("structured_outputs.json"),
    "guided_regex": _renamed("structured_outputs.regex"),
    "guided_whitespace_pattern": Refused(
        "white space in JSON is a setting of the server, engine.json_white_space"
    ),
    "kv_transfer_params": Refused("prefill and decode on different servers are not served"),
    "length_penalty": Refused(_NO_BEAMS, (1,)),
    "logits_processors": Refused("code from clients is not executed", ([],)),
    "prompt_embeds": Refused("embeddings are not served as a prompt"),
    "repetition_detection": Refused("repetition detection is not served"),
    "request_id": Refused("the request id comes from the header X-Request-Id"),
    "return_tokens_as_token_ids": Refused(
        "log-probabilities name tokens by their text; return_token_ids returns their ids", (False,)
    ),
    "spaces_between_special_tokens": Refused(
        "spaces between special tokens are not configurable", (True,)
    ),
    "truncate_prompt_tokens": Refused("prompts are not truncated"),
    "use_beam_search": Refused(_NO_BEAMS, (False,)),
    "vllm_xargs": Refused("arguments of extensions are not served", ({},)),
}

OF_COMPLETIONS: Mapping[str, Refused] = {
    **_OF_BOTH,
    "add_generation_prompt": Refused("completions use no chat template", (True,)),
    "chat_template": Refused("completions use no chat template"),
    "chat_template_kwargs": Refused("completions use no chat template", ({},)),
    "continue_final_message": Refused("completions use no chat template", (False,)),
    "max_completion_tokens": _renamed("max_tokens"),
    "suffix": Refused("text is not filled in before a suffix", ("",)),
    "top_logprobs": _renamed("logprobs"),
}

OF_CHATS: Mapping[str, Refused] = {
    **_OF_BOTH,
    "audio": Refused(_NO_AUDIO),
    "best_of": Refused("best_of is served by /v1/completions only", (1,)),
    "chat_template": Refused("the server chooses the chat template"),
    "documents": Refused("documents are not passed to the chat template", ([],)),
    "echo": Refused("echo is served by /v1/completions only", (False,)),
    "function_call": Refused(NO_FUNCTIONS, ("none",)),
    "functions": Refused(NO_FUNCTIONS, ([],)),
    "include_reasoning": Refused(_NO_REASONING, (True, False)),
    "media_io_kwargs": Refused("only text is served", ({},)),
    "mm_processor_kwargs": Refused("only text is served", ({},)),
    "modalities": Refused("only text is served", (["text"],)),
    "parallel_tool_calls": Refused(NO_TOOLS, (True, False)),
    "reasoning_effort": Refused(_NO_REASONING, ("none",)),
    "suffix": Refused("text is not filled in before a suffix", ("",)),
    "thinking_token_budget": Refused(_NO_REASONING),
    "tool_choice": Refused(NO_TOOLS, ("none",)),
    "tools": Refused(NO_TOOLS, ([],)),
    "verbosity": Refused("verbosity levels are not served", ("medium",)),
    "web_search_options": Refused("web search is not served"),
}

OF_MESSAGES: Mapping[str, Refused] = {
    "annotations": Refused("annotations are not passed to the chat template", ([],)),
    "audio": Refused(_NO_AUDIO),
    "function_call": Refused(NO_FUNCTIONS),
    "refusal": Refused("refusals are not passed to the chat template"),
}

# Types of the parts of a message's content.
CONTENT_TYPES: Mapping[str, str] = {
    "audio_url": _NO_AUDIO,
    "document": _NO_FILES,
    "file": _NO_FILES,
    "image": _NO_IMAGES,
    "image_embeds": _NO_IMAGES,
    "image_pil": _NO_IMAGES,
    "image_url": _NO_IMAGES,
    "input_audio": _NO_AUDIO,
    "input_file": _NO_FILES,
    "input_image": _NO_IMAGES,
    "tool_result": NO_TOOLS,
    "tool_use": NO_TOOLS,
    "video": _NO_VIDEO,
    "video_url": _NO_VIDEO,
}


def content_type(given: str, field: str) -> UnsupportedField:
    """Return the error for a part of a message that is not text.

    Parameters
    ----------
    field
        Path of the type, such as ``messages[0].content[0].type``.
    """
    sentence = CONTENT_TYPES.get(given, "only text is served")
    return UnsupportedField(
        f'{sentence}: {field} must be "text", got {described(given)}', field=field
    )


def unknown(field: str, hint: str = "") -> UnsupportedField:
    """Return the error for a field that neither API has."""
    return UnsupportedField(f"this field is unknown: {field}{hint}", field=field)
