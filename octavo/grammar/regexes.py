"""Regexes as llguidance's Lark dialect has them."""

from __future__ import annotations


def literal(text: str) -> str:
    """A regex of llguidance for just this text."""
    return "".join(
        char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text
    )


# Of ASCII alone, as in JSON Schema: what follows them matches wherever it is checked, while the
# larger classes differ between languages and their versions.
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^ \t\n\r\f\v]",
}


def between_slashes(regex: str) -> str:
    """The regex as it stands between the slashes of a Lark grammar: without a bare slash or line
    end, and with classes of ASCII."""
    out, escaped = [], False
    for char in regex:
        if escaped:
            out.append(_CLASSES.get(char) or ("\\n" if char == "\n" else "\\" + char))
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            out.append({"\n": r"\n", "/": r"\/"}.get(char, char))
    return "".join(out) + "\\" * escaped
