"""A directive from a function that gives Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


def directive(text: Callable[[str], str], *, takes_argument: bool) -> type[SphinxDirective]:
    """A directive whose content is `text(argument)`; the argument is empty where it takes none."""

    class FromText(SphinxDirective):
        required_arguments = int(takes_argument)

        def run(self) -> list[nodes.Node]:
            """Parse the Markdown in the directive's place; it may hold sections."""
            argument = self.arguments[0] if self.arguments else ""
            return self.parse_text_to_nodes(text(argument), allow_section_headings=True)

    return FromText


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a column without any content is left out."""
    listed = [[_cell(text) for text in row] for row in rows]
    kept = [column for column in range(len(head)) if any(row[column] for row in listed)]
    lines = [[head[column] for column in kept], ["---"] * len(kept)]
    lines += [[row[column] for column in kept] for row in listed]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """A block of Python."""
    return f"```python\n{text}\n```"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
