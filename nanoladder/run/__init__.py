"""The housekeeping of a run: its metrics, pictures, signals, faults and memory. Not the training itself."""
