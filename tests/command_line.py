"""The command line inside the test's own process: mrb("list") does what `mrb list` does."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from moe_routing_bench.cli import app


def mrb(*words: object, code: int = 0) -> Result:
    """What it printed; any other exit code than the expected one fails, and our own errors are raised."""
    ran = CliRunner().invoke(app, [str(word) for word in words])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    assert ran.exit_code == code, ran.output
    return ran


def mrb_json(*words: object, code: int = 0) -> Any:
    return json.loads(mrb(*words, "--json", code=code).stdout)


def refused(*words: object) -> str:
    """The one sentence that a mistake gets."""
    ran = mrb(*words, code=2)
    assert ran.stderr.startswith("mrb: ") and ran.stderr.count("\n") == 1 and ran.stderr[:-1].isprintable()
    assert not ran.stdout
    return ran.stderr
