"""Consumer side: stream state machine, inventory, ZeroMQ subscriber, index writer, sidecar."""
