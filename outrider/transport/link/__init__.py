"""The stream of a link, at both ends: messages waiting to be sent, their size, heartbeats."""
