"""Ends any process that loads its file, with exit code 0: the parent must never load it."""

import os

os._exit(0)
