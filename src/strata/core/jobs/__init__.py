"""What a job decides for itself: what it restores and saves, with whom it continues, and what its run is."""
