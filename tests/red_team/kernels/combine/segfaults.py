"""Reads address zero."""

import ctypes


def run(y_RD, gate_TK, plan):
    ctypes.string_at(0)
    raise AssertionError("address zero could be read")
