"""What is measured and logged: metrics by step, slow ranks, time lost, log lines."""
