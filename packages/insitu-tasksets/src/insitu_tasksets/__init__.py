"""Public task sets: SWE-bench and its kin, contests, functions, Harbor, verifiers, OpenEnv."""
