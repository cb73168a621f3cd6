"""Runtime of one service: engine core, scheduler, sessions, engine thread and output. No torch."""
