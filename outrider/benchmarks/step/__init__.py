"""One step without its forwards: what the wire, the threads and the coordinator add to two services of known cost.

Three real processes, the real coordinator and the real links; only the models are stand-ins that take a fixed time.
"""
