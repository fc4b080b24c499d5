"""The fork server alone imports this file (fork_server.py). The server then adopts the processes that its
workers leave behind.

So they are found among its descendants, wherever they hide. What the user's own process starts, such as a
job that a notebook detaches, is not among those.
"""

from __future__ import annotations

import warnings

from moe_routing_bench.bench.hosts.freezing import adopt_orphans

adopt_orphans()
# the server says so whenever a process ends that it did not fork itself
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
