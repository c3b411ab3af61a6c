"""The HTTP face: middleware, routes, live events, the dashboard."""
