"""Tensor plane: large tensors from one service to another without passing through the coordinator.

A target writes rows into a ring that its draft reads, and the coordinator carries a reference: plane, place in the
ring, sequence number. Owns how two processes find each other, which plane they use and why, and that neither is harmed
when the other dies or hangs. Knows bytes and tensors; no tokens, no sessions, no gRPC.

One connection has a writer and a reader:

1. ``PlaneWriters.offer()`` makes an offer (``values``), which the coordinator brings to the draft.
2. ``PlaneReaders.accept(offer)`` connects to the writer's listener (``control``) and proves that it holds the offer.
3. The writer opens the planes that both ends can use, one after the other, sends a probe through each, and chooses the
   fastest (``negotiation``).
4. ``PlaneWriter.put`` places rows in the ring (``ring``); ``PlaneReaders.read`` fetches them and gives the place back.
5. A thread beside each end exchanges heartbeats. What hangs is aborted, and the next plane takes over.
"""
