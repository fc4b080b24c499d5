"""Trains small language models under equal conditions, to see what a routing rule costs in quality.

text       the bytes that are learnt, and a part held out
ngram      the byte-trigram model that a run must beat
settings   one run as data: sizes, rule, optimiser
model      the decoder
watching   what its routers do while it learns
loop       one run, from the first step or a saved state
stepping   the time of a step of several runs, in turns
decoding   tokens a second of a trained model, with a cache
study      a whole study in one folder; study_rules says which runs answer which question

Calling this package calls `train` of api.py.
"""

import sys

from moe_routing_bench.core.callable_folder import CallableFolder

sys.modules[__name__].__class__ = CallableFolder
