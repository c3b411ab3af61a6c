"""What a training loop logs, and what a job measures of itself."""
