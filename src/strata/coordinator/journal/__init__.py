"""The durable history of the coordinator: events as bytes, and where they are kept."""
