"""The processes of a node: supervisor, executors, watchdog, and what they say to one another."""
