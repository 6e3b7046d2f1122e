"""Other training loops, compared with ours: one task, a process for each loop, one clock.

task.py measures one, and is the task that every peer gets. The other files each run one peer: its own loop, called
through its public interface. None of its code is copied here.
"""
