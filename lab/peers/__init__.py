"""The training loops that people use, beside ours: the same task for each, in a process of its own, by one clock.

task.py measures one, and is the task that every peer gets. The other files each run one peer: its own loop, called
through its public interface. None of its code is copied here.
"""
