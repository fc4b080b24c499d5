"""What is timed: an operation, packing, routing, a layer, a decoder block. One file a span."""
