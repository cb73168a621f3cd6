"""The coordinator: runs the speculation loop, decides what to accept, keeps both services in step.

It is all that a user sees.

::

    loop        the state machine of one session: events in, commands out
    acceptance  the rules by which draft tokens are kept
    speculation how long proposals are
    text        tokens to text and back, stop texts
    admission   who runs and who waits
    service     the asynchronous driver: links, timers, streams

Imports no torch, anywhere.
"""
