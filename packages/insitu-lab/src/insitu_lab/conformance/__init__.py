"""Real agents through the real gateway with a scripted policy, and the books checked."""
