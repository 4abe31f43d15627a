"""The names of a mixture's experts that are stored one by one.

transformers stacks their matrices while it loads them. Its rules for this have the stored names; here they give the
names of most classes, so that a rank can read its part of each expert.
"""

from __future__ import annotations

import re
from typing import Any

_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")
# Stacked matrix to what transformers does with the experts' own, and their names.
_STACKS = {
    "gate_up_proj": (["MergeModulelist", "Concatenate"], ("gate_proj", "up_proj")),
    "down_proj": (["MergeModulelist"], ("down_proj",)),
}


def expert_name(name: str, converter: Any) -> str | None:
    """Return the name of an expert's matrix, `<mixture>.<number>.gate_proj.weight` (up_proj, down_proj).

    Parameters
    ----------
    name
        As stored.
    converter
        transformers' `WeightConverter` of this tensor.

    Returns
    -------
    The name; None: the converter does something else than to stack experts.
    """
    match = _EXPERT.fullmatch(name)
    target, *others = converter.target_patterns
    operations, matrices = _STACKS.get(target.rpartition(".")[2], ([], ()))
    kinds = [type(operation).__name__ for operation in converter.operations]
    sources = [
        source.split(".")[-2] for source in converter.source_patterns if source.endswith(".weight")
    ]
    if match is None or others or kinds != operations or len(sources) != len(matrices):
        return None
    return f"{match[1]}.{match[2]}.{dict(zip(sources, matrices, strict=True))[match[3]]}.weight"
