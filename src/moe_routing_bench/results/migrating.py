"""Records of older schema versions as those of the newest. Files are never changed: lines of version 1 stay
as they were written, and are migrated each time they are read.

Version 2 (November 2026) has all fields that version 1 came to have over time, and two more: `engine` and
`cell_seconds`. All records of a cell have one `created_at`; in version 1 they were some microseconds apart.
"""

from __future__ import annotations

import json
import re
from typing import Any

SCHEMA_VERSION = 2
MAY_BE_OLD = re.compile(rb'"schema_version"\s*:\s*1\b')
# by part of a record, what it may lack in version 1, and what that meant
VERSION_1: dict[str, dict[str, Any]] = {
    "": {"engine": "", "cell_seconds": None},
    "what": {"router": "", "layer": ""},
    "workload": {"store": ""},
    "implementation": {"runs": ""},
    "work": dict.fromkeys(
        ("tokens_per_second", "flops_per_second", "bytes_per_second", "wire_bytes", "least_wire_bytes")
    ),
    "correctness": {"error": None},
}


def newest(line: bytes) -> bytes | str:
    """A line of version 1 as one of version 2; any other as it is. It may be wrong in every other way."""
    if not MAY_BE_OLD.search(line):
        return line
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line
    version = record.get("schema_version") if isinstance(record, dict) else None
    if type(version) is not int or version != 1:  # not True, not 1.0
        return line
    for part, missing in VERSION_1.items():
        if isinstance(inside := record.get(part) if part else record, dict):
            inside |= {name: value for name, value in missing.items() if name not in inside}
    return json.dumps({**record, "schema_version": SCHEMA_VERSION})
