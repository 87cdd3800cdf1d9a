"""Finds broken links, broken anchors and pages that no link reaches in README and docs/.

    python -m tests.system.docs.links

Reads the Markdown alone: needs no network, and nothing that is built. Not for the navigation of the
site: see docs/conf.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[3]
START = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The link targets of a page, each with the first line of its block, and the page's anchors."""

    links: tuple[tuple[int, str], ...]
    anchors: frozenset[str]


def page_names(root: Path) -> list[str]:
    """Return the Markdown files at the root and in docs/, which are also the pages of the site."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def parse(text: str) -> Page:
    links: list[tuple[int, str]] = []
    anchors: set[str] = set()
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for index, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else 1
        for part in (token, *(token.children or ())):
            links += [(line, target) for target in _targets(part)]
            if part.type in ("html_inline", "html_block"):
                anchors |= {*re.findall(r'\b(?:id|name)="([^"]+)"', part.content)}
        if token.type == "heading_open":
            anchors.add(_unused(_slug(tokens[index + 1]), anchors))
    return Page(links=tuple(links), anchors=frozenset(anchors))


def problems(root: Path) -> Iterator[str]:
    """Yield one line for each broken link, broken anchor and unreachable page."""
    pages = {name: parse((root / name).read_text(encoding="utf-8")) for name in page_names(root)}
    links_of: dict[str, set[str]] = {name: set() for name in pages}
    for name, page in pages.items():
        for line, target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (root / name).parent / unquote(parts.path) if parts.path else root / name
            if not path.is_file():
                yield f"{name}:{line}: {target}: there is no such file"
                continue
            other = path.resolve().relative_to(root.resolve()).as_posix()
            links_of[name].add(other)
            if parts.fragment and other not in pages:
                yield f"{name}:{line}: {target}: only pages have anchors"
            elif parts.fragment and unquote(parts.fragment) not in pages[other].anchors:
                yield f"{name}:{line}: {target}: {other} has no such heading"
    reached, found = set(), {START}
    while found:
        reached |= found
        found = {other for name in found for other in links_of[name] & pages.keys()} - reached
    for name in sorted(pages.keys() - reached):
        yield f"{name}: no chain of links from {START} leads to this page"


def _targets(token: Token) -> Iterator[str]:
    if token.type in ("link_open", "image"):
        yield str(token.attrGet("href" if token.type == "link_open" else "src"))
    elif token.type in ("html_inline", "html_block"):
        yield from re.findall(r'\b(?:href|src|srcset)="([^"]+)"', token.content)


def _slug(heading: Token) -> str:
    """Return the anchor of a heading as code hosts make it."""
    said = (part.content for part in heading.children or () if part.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", "".join(said).lower()).replace(" ", "-")


def _unused(slug: str, anchors: set[str]) -> str:
    """Return the slug, with a number if an earlier heading of the page has the same one."""
    numbered = (f"{slug}-{number}" for number in range(1, len(anchors) + 2))
    return next(name for name in (slug, *numbered) if name not in anchors)


if __name__ == "__main__":
    found = list(problems(ROOT))
    print(*found, sep="\n")
    sys.exit(1 if found else 0)
