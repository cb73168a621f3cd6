"""The runtime of one service: engine core, scheduler, sessions, worker thread and output; imports no torch."""
