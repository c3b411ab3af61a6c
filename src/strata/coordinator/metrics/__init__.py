"""What the coordinator measures, remembers and exports."""
