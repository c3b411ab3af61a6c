"""Which samples a run trains, in which order, on which worker, and the proof of it."""
