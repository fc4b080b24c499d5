"""A part of a results folder as a results folder of its own, for everything that reads one."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from moe_routing_bench.results.folder import ENVIRONMENTS
from moe_routing_bench.results.read import RECORDS, LeftOut, is_plain_file, read_records, session_folders
from moe_routing_bench.results.verify import SAMPLES

Selection = Mapping[str, Collection[str] | None]  # session -> the ids of its records; None: all of them


def copy_selected(folder: Path, target: Path, selection: Selection) -> None:
    """Write the selected records into the empty folder `target`, with their samples and environments."""
    if (folder / ENVIRONMENTS).is_dir():
        shutil.copytree(folder / ENVIRONMENTS, target / ENVIRONMENTS, symlinks=True)
    for session, source in session_folders(folder).items():
        if session not in selection:
            continue
        wanted = selection[session]
        records = read_records(source / RECORDS, session, LeftOut())
        lines = [one.line() for one in records if wanted is None or one.record_id in wanted]
        home = target / source.name
        home.mkdir()
        (home / RECORDS).write_bytes(b"".join(lines))
        if is_plain_file(source / SAMPLES):
            shutil.copyfile(source / SAMPLES, home / SAMPLES)
