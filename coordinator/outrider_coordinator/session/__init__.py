"""Session: the speculation loop as a state machine, the state on both services, commands and output."""
