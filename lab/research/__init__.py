"""Research: the token efficiency of each rung, the race to a loss, and its records."""
