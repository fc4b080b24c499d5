"""Ends the process at its first call: with exit code 0 and no word, by a signal, or by an odd exception."""

import os
import signal
import time


def run(y_RD, gate_TK, plan, *, how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "system_exit":  # no `except Exception` sees it
        raise SystemExit(0)
    if how == "keyboard_interrupt":  # as if the user had pressed Ctrl-C
        raise KeyboardInterrupt
    if how == "fork" and os.fork() == 0:  # a child holds every pipe open for 300 s in a session of its own
        os.setsid()
        time.sleep(300)
    os._exit(0)
