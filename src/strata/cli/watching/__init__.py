"""Commands that read what the coordinator knows: listings, logs, metrics, incidents, cost."""
