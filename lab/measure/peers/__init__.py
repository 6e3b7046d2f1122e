"""The training loops that people use, compared with ours: one task, each in a process of its own, by one clock.

task.py measures one, and is the task that every peer gets. The other files each run one peer: its own loop, called
through its public interface. None of its code is copied here.
"""
