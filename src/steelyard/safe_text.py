"""Text from a file, a model or a user, made safe to print: one line, no control characters.

Not for HTML, which has its own escaping.
"""


def printable(text: str, *, most: int = 200) -> str:
    """Return ``text`` with control characters for terminals escaped, cut after ``most`` characters.

    Names come from plan files and from modules. A name with an escape sequence could repaint the
    text around it, and one with a right-to-left mark could reorder it.
    """
    cut = text if len(text) <= most else text[: most - 3] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else _escaped(c) for c in cut)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
