"""Routing: replicas and their links, placement of sessions, dispatch of commands."""
