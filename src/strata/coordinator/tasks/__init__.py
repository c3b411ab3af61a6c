"""Tasks made real: plans, launchers, and the runner that watches them."""
