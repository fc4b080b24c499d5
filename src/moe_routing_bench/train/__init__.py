"""Small language models trained under equal conditions: what does a routing rule cost in quality?

text       what is read: bytes, a part held out
ngram      the byte-trigram model that a run must beat
rules      what may stand behind attention, and what a step of it computes
model      the decoder
watching   what its routers do while it learns
loop       one run, from the first step or a saved state
stepping   the time of a step of several runs, in turns
decoding   tokens a second of a trained model, with a cache
studies    which runs answer which question

Called, it is `train` of api.py.
"""

import sys

from moe_routing_bench import CallableFolder

sys.modules[__name__].__class__ = CallableFolder
