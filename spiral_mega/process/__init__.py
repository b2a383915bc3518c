"""The process of a rank: signals and requests to stop, heartbeat and watchdog, imports, exit."""
