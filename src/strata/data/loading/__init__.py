"""Which samples a rank reads next, handing them to a loop, and the position that a checkpoint records."""
