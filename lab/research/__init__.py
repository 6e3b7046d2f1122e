"""Research: what each rung of the second ladder is worth in tokens, the race to a loss, and its records."""
