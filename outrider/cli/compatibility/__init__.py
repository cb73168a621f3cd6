"""``vllm serve``'s command line as ``outrider serve`` reads it: spellings, and flags that it has no option for."""

from outrider.cli.compatibility.command import ServeCommand

__all__ = ["ServeCommand"]
