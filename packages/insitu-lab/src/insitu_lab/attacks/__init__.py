"""Attacks on the grader, as a suite that users run too: what they leave behind, and what must come of it."""
