"""Commands and Python in README and docs: what stands there, line by line, for the tests that run it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

SKIPPED = ("study/slides.md", "study/summary.md")  # sources; study.md has their text
PROGRAMS = r"(?:[A-Z_]+=\S* )*(?:mrb|python|pip|bash|pytest|make|vllm|torchrun) "


@dataclass(frozen=True)
class Command:
    document: str
    text: str  # without what is said about it
    mentioned: bool  # inside a sentence or a table: it may be a name alone

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


@dataclass(frozen=True)
class Python:
    document: str
    line: int
    text: str


def documents() -> dict[str, str]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return {name: path.read_text() for name, path in names.items() if not name.endswith(SKIPPED)}


def commands() -> list[Command]:
    """Each once, from the first document that has it; one that stands by itself before one in a sentence."""
    found = [command for name, text in documents().items() for command in commands_of(name, text)]
    found.sort(key=lambda command: command.mentioned)
    return list({command.text: command for command in reversed(found)}.values())[::-1]


def commands_of(name: str, text: str) -> list[Command]:
    found = []
    for block in _blocks(text):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            if re.match(PROGRAMS, f"{line} "):
                for one in re.split(r" && ", re.split(r" {2,}| #", line.strip())[0]):
                    found.append(Command(name, one.strip(), mentioned=False))
    plain = re.sub(r"^```.*?^```|^    [^\n]*$", "", text, flags=re.S | re.M)
    for line in re.findall(rf"`({PROGRAMS}[^`]+)`", plain):
        found.append(Command(name, " ".join(line.split()), mentioned=True))
    return found


def _blocks(text: str) -> list[str]:
    """What is in ```sh, and every indented block."""
    fenced = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    indented = re.findall(r"(?:\A|\n\n)((?:    .*(?:\n|\Z))+)", rest)
    return [*fenced, *(re.sub(r"^    ", "", block, flags=re.M) for block in indented)]


def pythons() -> list[Python]:
    """In ```python, in the order of the documents."""
    return [
        Python(name, text[: match.start()].count("\n") + 1, match[1])
        for name, text in documents().items()
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
    ]


def file_named(python: Python) -> Path | None:
    """`# file: my_kernels/combine/mine.py` in its first line: it is a file and not a script."""
    match = re.match(r"# (?:file: )?(\S+/\S+\.py)\n", python.text)
    return Path(match[1]) if match else None
