"""The agent of agents/terminus.py. It runs alone in a sandbox: standard library only, nothing else of
insitu."""
