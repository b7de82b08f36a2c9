"""For the reference: columns and interpreter sessions in docstrings are shown as they stand, as code blocks."""

import re

import griffe


class AsTheyStand(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            paragraphs = re.split(r"\n\n+", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(_as_it_stands, paragraphs))


def _as_it_stands(paragraph: str) -> str:
    """A paragraph that begins with a prompt, or whose lines all have columns (two spaces in them), becomes a block."""
    lines = paragraph.split("\n")
    session = lines[0].startswith(">>> ")
    columns = len(lines) > 1 and all(re.match(r"\S.*?\S  +\S", line) for line in lines)
    return f"```{'pycon' if session else 'text'}\n{paragraph}\n```" if session or columns else paragraph
