"""Agent program of the terminus harness; runs in the sandbox and uses only the standard library."""
