"""Benchmarks as a product: one harness, one result schema, tables made from committed results.

`outrider bench serve | rpc | engine` runs them; `python -m outrider.benchmarks.report` turns
`benchmarks/results/*.json` into tables. Nothing here is imported by the services or by the SDK.
"""
