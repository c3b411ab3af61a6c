"""Commands about data: what is in it, indexing it, mixing it, the proof of what was trained."""
