"""Hook of mkdocs: a link from docs/ to another file of the repository becomes that file's path as text.

On a repository page such a link works. The site holds docs/ only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\.?/[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the links of one page.

    Raises
    ------
    FileNotFoundError
        A link names a file that the repository does not have.
    """
    folder = (DOCS / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        target = (folder / match["target"]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri}: there is no {target}")
        path, text = target.relative_to(ROOT).as_posix(), match["text"]
        return f"`{path}`" if path in text else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
