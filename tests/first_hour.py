"""The first hour of a newcomer: each command and script of README and the tutorials, in an empty environment.

python tests/first_hour.py FOLDER                     writes measurements/first_hour.json
python tests/first_hour.py FOLDER --only "mrb list"   only commands that contain this; writes nothing

It ends with an error if one of them did. FOLDER holds the environment and the files that commands name.
A command in LEFT_OUT is not run, for the reason given there; tests/test_snippets.py still reads its options.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import test_snippets
from documents import commands_of, documents, file_named, pythons
from repository import ROOT

PAGES = ("README.md", "docs/tutorials/")
LIMIT_SECONDS = 900
LEFT_OUT = {
    r"(MRB_PREBUILD=1 )?pip |make ": "installs; what this script installs is its first row",
    r"(\S*= )?vllm |LOCAL_KERNELS|.*kt_kernel|mrb model kernels": "needs vLLM, kernels or kt-kernel",
    r".*gpu-(quick|hour)|mrb gpu |pip install triton": "needs a GPU, or Triton: a step of .ci/run",
    r".*(DIR|--checkpoint)": "needs a checkpoint of your own; tests/models has small ones",
    r".*s3://": "needs an object store; test_fleet_s3.py has one",
    r"mrb sweep (?!.*--dry-run)|python measurements/sweeps.py": "hours of measuring; with --dry-run it runs",
    r"mrb train study (?!.*--dry-run)": "hours of training",
    r"mrb check$|pytest ": "half an hour: a step of .ci/run",
    r"python measurements/figures.py|mrb results report measurements": "tests compare what it writes",
}


def install(folder: Path) -> Path:
    """An environment with torch and '.[hf,native,report]' alone; its bin folder."""
    subprocess.run([sys.executable, "-m", "venv", folder / "empty"], check=True)
    pip = [folder / "empty/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, f"{ROOT}[hf,native,report]"], check=True)
    return folder / "empty/bin"


def lines() -> list[tuple[str, str]]:
    """Page and what a newcomer would type, in the order of the pages, without Python that needs a model."""
    found = [
        (one.document, one.text)
        for page, text in documents().items()
        for one in commands_of(page, text)
        if not test_snippets.a_name_alone(one)
    ]
    scripts = [
        (one.document, "python - <<'END'\n" + one.text + "END")
        for one in pythons()
        if file_named(one) is None and not re.search(r"\b(model|x)\b(?! *=)", one.text)
    ]
    return [(page, text) for page, text in dict.fromkeys([*found, *scripts]) if page.startswith(PAGES)]


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("folder", type=Path)
    words.add_argument("--only", default="")
    asked = words.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    folder, began = asked.folder.resolve(), time.perf_counter()
    bin_folder = folder / "empty/bin"
    if not (bin_folder / "mrb").exists():
        install(folder)
    rows = [
        {
            "page": "README.md",
            "command": "pip install",
            "code": 0,
            "seconds": round(time.perf_counter() - began),
        }
    ]
    place = folder / "place"
    if not place.exists():
        place.mkdir()
        test_snippets.furnish(place)
    here = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    here |= {"PATH": f"{bin_folder}:{os.environ['PATH']}", "MRB_HOME": str(folder / "home")}
    for page, text in lines():
        if asked.only not in text:
            continue
        why = next((why for pattern, why in LEFT_OUT.items() if re.match(pattern, text)), None)
        if why is not None:
            rows.append({"page": page, "command": text, "left_out": why})
            continue
        began = time.perf_counter()
        try:
            ran = subprocess.run(
                ["bash", "-c", text],
                cwd=place,
                env=here,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
            code, said = ran.returncode, (ran.stdout + ran.stderr)[-400:]
        except subprocess.TimeoutExpired:
            code, said = 124, f"did not end in {LIMIT_SECONDS} s"
        seconds = round(time.perf_counter() - began, 1)
        rows.append(
            {"page": page, "command": text, "code": code, "seconds": seconds}
            | ({"said": said} if code else {})
        )
        print(
            f"{code:3d} {seconds:6.1f} s  {page}: {text.splitlines()[0]}{': ' + said if code else ''}",
            flush=True,
        )
    if not asked.only:
        (ROOT / "measurements/first_hour.json").write_text(json.dumps(rows, indent=1) + "\n")
    failed = sum(row.get("code", 0) != 0 for row in rows)
    left_out = sum("left_out" in row for row in rows)
    print(f"{len(rows) - left_out} ran, {failed} failed, {left_out} left out")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
