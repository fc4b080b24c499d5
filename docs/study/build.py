"""The study, its slides and its summary, from the records under measurements/.

    python docs/study/build.py            figures and three PDFs

study.md, slides.md and summary.md are the sources: words and {{placeholders}}. facts.py has the numbers,
pictures.py the figures. The docs site fills study.md when it is built. Pandoc converts the same text for
Typst, which makes the PDFs: pip install '.[study]' brings both. built.json has hashes of what they were
made from, and a test compares.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # a test imports this file from elsewhere

from facts import MEASUREMENTS, ROOT, fill  # noqa: E402

BUILT = HERE / "built.json"
# PDF -> (source, style)
PDFS = {
    "study.pdf": ("study.md", "paper.typ"),
    "slides.pdf": ("slides.md", "slides.typ"),
    "summary.pdf": ("summary.md", "paper.typ"),
}
COUNT = "\n#context [#metadata(counter(page).final().first()) <end>]\n"


def page() -> str:
    """study.md with its placeholders filled."""
    return fill((HERE / "study.md").read_text())


def sources() -> dict[str, str]:
    """What figures and PDFs are made from -> its hash. Texts count with their placeholders filled."""
    texts = {name: fill((HERE / name).read_text()).encode() for name, _ in PDFS.values()}
    looks = {look: (HERE / look).read_bytes() for _, look in PDFS.values()}
    drawn = [
        *(MEASUREMENTS / "records").glob("*.tar.xz"),
        *(MEASUREMENTS / "training").glob("*/*.json*"),
        MEASUREMENTS / "routers" / "balance.json",
        HERE / "pictures.py",
    ]
    files = {str(path.relative_to(ROOT)): path.read_bytes() for path in drawn}
    return {
        name: hashlib.sha256(body).hexdigest()[:16] for name, body in sorted((texts | looks | files).items())
    }


def make_pdf(name: str) -> int:
    """Makes one PDF and returns its number of pages."""
    import matplotlib
    import pypandoc
    import typst

    source, look = PDFS[name]
    title, _, text = fill((HERE / source).read_text()).partition("\n")
    body = pypandoc.convert_text(
        text, "typst", format="gfm+tex_math_dollars+implicit_figures-autolink_bare_uris",
        extra_args=["--wrap=none", "--columns=10000", "--shift-heading-level-by=-1"],
    )  # fmt: skip
    body = body.replace("dot.circle", "dot.o")  # pandoc 3.9 writes a name that Typst 0.15 has changed
    whole = HERE / f".{name}.typ"
    whole.write_text((HERE / look).read_text().replace("TITLE", title.removeprefix("# ")) + body + COUNT)
    try:
        fonts = [str(Path(matplotlib.get_data_path()) / "fonts" / "ttf")]
        typst.compile(str(whole), output=str(HERE / name), root=str(ROOT), font_paths=fonts)
        pages = typst.query(str(whole), "<end>", field="value", one=True, root=str(ROOT), font_paths=fonts)
    finally:
        whole.unlink()
    return int(pages)


def main() -> None:
    from pictures import write

    for path in write(HERE / "figures"):
        print(path.relative_to(ROOT))
    for name in PDFS:
        print(f"{name}: {make_pdf(name)} pages, {(HERE / name).stat().st_size / 1000:.0f} kB")
    BUILT.write_text(json.dumps(sources(), indent=1) + "\n")


if __name__ == "__main__":
    main()
