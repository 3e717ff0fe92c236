"""What mkdocs does to a page before it is rendered."""

import re
from pathlib import PurePosixPath

LINK = re.compile(r"\[([^\]\[]*)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Links to files outside docs/ lead nowhere in the site: they become the file's path in the repository."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def named(match: re.Match[str]) -> str:
        parts: list[str] = []
        for part in (folder / match[2]).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = "/".join(parts)
        return match[0] if parts[0] == "docs" else f"`{path}`" if match[1] in path else f"{match[1]} (`{path}`)"

    return LINK.sub(named, markdown)
