"""The coordinator: runs the speculation loop, decides which draft tokens are accepted, and owns the committed tokens.

::

    requests      input processing, admission, running requests, failover, output
    routing       replicas, links, placement, dispatch
    tracing       records of sampled requests, and their spans
    session       the state machine of one session
    speculation   draft length policy
    acceptance    acceptance rules
    text, stats   detokenization and stop strings; counters and times
    service       the asynchronous service that connects them

Imports no torch.
"""
