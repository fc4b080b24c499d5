"""What to measure: routing workloads, recorded traces, named cases and published sizes."""
