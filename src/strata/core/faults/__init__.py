"""What went wrong, whether to start again, who is notified and what it cost."""
