"""Where the repository's files are, for tests that read them."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moe_routing_bench"
