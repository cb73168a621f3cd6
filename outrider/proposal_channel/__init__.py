"""Proposal channel: proposals from a draft to a target, without waiting for the coordinator.

A coordinator that asks a draft for proposals may tell the target at the same time what it is to score once they are
there (``ScoreAhead``). The draft then sends them twice: to the coordinator, which judges with them, and by this channel
to the target, which begins. Owns how the two ends find each other, the bytes on the socket, and that a target which
waits in vain says so. Knows no tensors, no torch, no gRPC.

1. ``ProposalReceiver`` (the target's) makes an offer, which the coordinator brings to the draft.
2. ``ProposalSender`` (the draft's) connects at the loopback address, or by a stream to a target of another host, and
   proves that it holds the offer.
3. ``ProposalSender.send`` writes proposals before their answer leaves, and says in the answer that it did.
4. ``ProposalReceiver`` finds the ``ScoreAhead`` that waits for them, and hands the whole command to the engine.
5. ``ProposalReceiver`` sends verdicts back (``verdicts``), and ``ProposalSender`` hands them to the engine.
"""
