"""The training loops that people use, beside ours: the same task for each, in a process of its own, by one clock.

mode.py asks for the measurements and reports them; task.py takes one, and is the task that every peer gets. The other
files each run one peer: its own loop, called through its public interface. None of its code is copied here.
"""
