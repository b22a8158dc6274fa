"""Engine side: block pool, simulated worker, event publisher, per-engine hash rules."""
