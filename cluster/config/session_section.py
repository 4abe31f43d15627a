"""The section `session` of an application's arguments."""

from __future__ import annotations

from pydantic import Field

from quire.cluster.config.engine_section import option_field
from quire.cluster.config.section import Section


class SessionArgs(Section):
    """Conversations of several requests: how long their KV cache is retained between requests."""

    retain_s: float = Field(
        default=90.0,
        ge=0,
        le=3600,
        description="Seconds for which a conversation's KV blocks are evicted after all others, when an answer has "
        "ended with a tool call. The default covers 99% of the pauses of public traces of agents. 0: blocks are "
        "evicted in the ordinary order.",
    )
    max_share: float = option_field("session_max_share")
