"""One session: the speculation loop as a state machine, its state on both services, commands and output."""
