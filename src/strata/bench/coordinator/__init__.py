"""The coordinator measured from outside: heartbeats, barriers, plans, dashboards, beside torch's TCPStore."""
