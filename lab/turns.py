"""Workers: processes that train at the same time and step in turns, so that a round takes no longer than its steps.

A process that has compiled a step and warmed up waits for its turn (measure.take_turns), and disturbs nobody meanwhile,
but it holds its memory. On Linux all of them are forks of one server, so that none has a luckier layout of memory.
"""

from lab import launch, measure
from nanoladder import machine


class Worker(launch.Child):
    """A process that trains with a config, and takes its steps when asked.

    losses: of the first steps. seconds: of a step, when last measured. Raises RuntimeError with the reason if the
    process fails, and TimeUp if an answer takes longer than `limit` seconds.
    """

    def __init__(self, config, limit):
        super().__init__(measure.take_turns, config)
        found = self.receive(limit)
        self.losses, self.seconds = found["losses"], found["seconds"]

    def turn(self, limit):
        """Seconds of a step, over about a second of steps."""
        self.seconds = self.ask(limit)["seconds"]
        return self.seconds


class WorkerPool:
    """The workers that run, one for each config; once two did not fit the memory, only one at a time (apart)."""

    def __init__(self):
        self.running, self.apart = {}, False

    def worker(self, config, limit):
        """The worker that trains with a config; starts it if it does not run. Raises RuntimeError and TimeUp."""
        if config not in self.running:
            if self.apart:
                self.end()
            try:
                self.running[config] = Worker(config, limit)
            except RuntimeError as error:
                if not (self.running and machine.is_out_of_memory(str(error))):
                    raise
                self.end()
                self.running[config] = Worker(config, limit)
                self.apart = True  # alone it fits
        return self.running[config]

    def end(self, config=None):
        """Ends the worker that trains with a config, or all."""
        for one in [config] if config else list(self.running):
            if one in self.running:
                self.running.pop(one).end()
