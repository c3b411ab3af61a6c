"""The fleet of one coordinator: who is a member, what they wait for, read, save and run."""
