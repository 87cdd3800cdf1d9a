"""Text from a file, a model or a user, made safe to show: one line, no control characters.

Not for HTML, which escapes its own.
"""


def printable(text: str, *, most: int = 200) -> str:
    """``text`` with everything a terminal would obey written as an escape, and cut at ``most``.

    Names come from plan files and from modules; one with an escape sequence could repaint what
    is said about it, one with a right-to-left mark could reorder it.
    """
    cut = text if len(text) <= most else text[: most - 3] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else _escaped(c) for c in cut)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
