"""`metatrie simulate`: what a routing policy does to latency and reuse, on recorded traces, without engines.

traces: requests and their blocks · engine: one replica's cache, queue and steps · fleet: the discrete-event run ·
suite: many runs · examples: small ones with known answers · report: what people look at · command: the options.
docs/routing.md says what the model is and what it leaves out.
"""
