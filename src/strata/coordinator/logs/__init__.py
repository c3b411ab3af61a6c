"""The log of the fleet, in memory and on disk."""
