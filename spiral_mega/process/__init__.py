"""One process of a run: signals, heartbeat and watchdog, exit, imports."""
