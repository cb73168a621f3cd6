"""The wire alone: two processes, payloads of bytes, no model.

Owns an echo server and the timing of calls to it, with the channel options that the services use. Knows no message of
the contract: what is measured is what gRPC costs by the number of bytes.
"""
