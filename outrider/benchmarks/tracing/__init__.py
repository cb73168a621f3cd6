"""Overhead of tracing, in the loops of coordinator and service and in the thread that makes spans."""
