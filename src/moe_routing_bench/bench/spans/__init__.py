"""Spans, one file each: what is timed together, such as an operation, packing, routing, a layer or a decoder
block."""
