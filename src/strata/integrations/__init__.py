"""Elastic jobs inside trainers that people already use. Each module needs its library and nothing else of it."""
