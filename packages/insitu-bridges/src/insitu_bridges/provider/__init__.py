"""The provider behind engine.kind = upstream: calls forwarded byte for byte, and recorded as text.

upstream.py (from the configuration) -> backend.py (sessions) -> call.py (one request)
limits.py (rates, outages), faults.py (whose fault it is), usage.py (what it bills)
"""
