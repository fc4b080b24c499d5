"""Results from many machines: sweeps, engines, claims, stores, bundles."""
