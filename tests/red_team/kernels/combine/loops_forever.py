"""Never returns from its first call, and ignores the polite signals. Ends by itself after 600 s."""

import signal
import threading
import time


def run(y_RD, gate_TK, plan):
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + 600
    while time.monotonic() < until:
        time.sleep(0.01)
    raise RuntimeError("nobody stopped the red team's endless loop in 600 s")
