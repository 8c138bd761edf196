"""A place without processes: tests say when what ends, by a clock of their own."""

from ludic.launch.process import Ended, Started


class Clock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class ScriptedPlace:
    """Starts at once; `end` makes a process end. `starts` has (time, name) of every start."""

    def __init__(self, clock):
        self.clock, self.running, self.news, self.starts, self.asked, self.stopped = clock, set(), [], [], [], []
        self.closed_with = None

    def start(self, process):
        assert process.name not in self.running
        self.running.add(process.name)
        self.starts.append((self.clock(), process.name))
        self.news.append(Started(process.name, 100 + len(self.starts), "here", f"{process.name}.log"))

    def end(self, name, code=None, signal=None):
        self.running.discard(name)
        self.news.append(Ended(name, code, signal, 1.0, "the last line"))

    def poll(self):
        news, self.news = self.news, []
        return news

    def ask(self, name, number=15):
        self.asked.append((self.clock(), name, number))

    def stop(self, names, grace_s):
        self.stopped += [(name, grace_s) for name in names]
        return self._kill([name for name in names if name in self.running])

    def close(self, grace_s=0.0):
        self.closed_with = grace_s
        return self._kill(sorted(self.running))

    def _kill(self, names):
        self.running -= set(names)
        return [Ended(name, None, 9, 1.0, "") for name in names]
