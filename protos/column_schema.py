"""Annotations of fields with one value per request, from which columns of the request table are derived.

```
 class SamplingParams:   temperature: Annotated[float, Range(0, 100), Column(np.float32, on_device=True)] = 1.0
                                                       bounds         host and device array
```
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Column(NamedTuple):
    """A column with one entry per request that has a row."""

    dtype: Any
    # Returns the entry. Argument: the value of the field; for a field of the table itself, the request. None: the
    # field's value; for a field of the table, the table's code writes it.
    source: Callable[[Any], Any] | None = None
    # The device has a copy. Such a column has entries of 4 bytes.
    on_device: bool = False
    # A checkpoint's `generation_config.json` may have the default.
    in_checkpoint: bool = False
    # Gathered once for the decoding rows, because each step reads it (`request_table/decode_rows.py`).
    in_decodes: bool = False


def annotated(kind: type, annotation: type[T]) -> dict[str, T]:
    """Map names of fields of `kind` to their annotations of this type, in the order of declaration."""
    # With the module's names as globals, functions inside the annotations see them.
    hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]), include_extras=True)
    found = {
        name: [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, annotation)]
        for name, hint in hints.items()
    }
    return {name: items[0] for name, items in found.items() if items}
