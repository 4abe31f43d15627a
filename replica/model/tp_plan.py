"""The tensor-parallel plan of a class: names of its modules and parameters, and on which side each is divided."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError

ROWS = "colwise"
GATHERED_ROWS = "colwise_gather_output"
SUMS = {"rowwise": False, "rowwise_split_input": True}  # whether the input has all features
EXPERTS = "moe_tp_experts"
# A module is not divided, but parameters of its own are, such as sinks of heads.
PARAMETERS = "local_params"
# The module is on every rank, or `EXPERTS` divides its tensor. A latent has one head for all ranks.
WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "packed_colwise", "mla_kv_a_proj"}
# For classes without a plan: the names of most classes, and gpt-oss. A proof finds classes that compute otherwise.
_USUAL = {
    "layers.*.self_attn": PARAMETERS,
    **{f"layers.*.self_attn.{name}": ROWS for name in ("q_proj", "k_proj", "v_proj", "sinks")},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.experts": EXPERTS,
    **{f"layers.*.mlp.{name}": ROWS for name in ("gate_proj", "up_proj")},
    "layers.*.mlp.down_proj": "rowwise",
}
# Products that give queries of whole heads: also of latent attention, and together with keys and values of each head.
_QUERIES = re.compile(r"(.+\.)?(self_attn\.(q_proj|q_b_proj)|attention\.query_key_value)")
_OF_HEADS = re.compile(r".*\.attn\..*|.*(self_attn|attention)\.(q|k|v|qkv|query)\w*")


class TpPlan:
    """The plan of a configuration: transformers', or one of usual names if transformers has none.

    Raises
    ------
    CheckpointError
        The plan has a style that is not known here, or divides heads with names that are not.
    """

    def __init__(self, config: Any):
        entries: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        if set(entries.values()) <= WHOLE:
            entries = _USUAL
        self._model_type = config.model_type
        self._styles = [
            (re.compile(r"(?:.+\.)?" + re.escape(name).replace(r"\*", r"\d+")), style)
            for name, style in entries.items()
        ]
        styles = set(entries.values())
        if unknown := styles - {ROWS, GATHERED_ROWS, *SUMS, EXPERTS, PARAMETERS, *WHOLE}:
            raise CheckpointError(
                f"tensor_parallel: the plan of model_type {config.model_type!r} has {sorted(unknown)[0]!r}, which is "
                "not served"
            )
        heads = [n for n, style in entries.items() if style == ROWS and _OF_HEADS.fullmatch(n)]
        if heads and not any(_QUERIES.fullmatch(name) for name in heads):
            raise CheckpointError(
                f"tensor_parallel: the plan of model_type {config.model_type!r} divides {heads[0]}, and heads of this "
                "name are not served"
            )

    def style(self, path: str) -> str | None:
        """Return how the module or tensor at a path is divided; None: it is not."""
        return next((style for name, style in self._styles if name.fullmatch(path)), None)

    def splits_heads(self, model: nn.Module) -> bool:
        """Whether a rank computes attention for its own heads, not for all.

        Raises
        ------
        CheckpointError
            The plan divides nothing of the model.
        """
        divided = [
            path
            for path, _ in model.named_modules()
            if self.style(path) not in (None, PARAMETERS, *WHOLE)
        ]
        if not divided:
            raise CheckpointError(
                f"tensor_parallel: transformers has no tensor-parallel plan for model_type {self._model_type!r}, and "
                "its modules have other names than usual"
            )
        return any(_QUERIES.fullmatch(path) and self.style(path) == ROWS for path in divided)
