"""Index side: the two index backends, the query, routing policies and the router's HTTP API."""
