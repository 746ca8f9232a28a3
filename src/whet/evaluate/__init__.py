"""Many attempts without training: `whet rollout`, pass@k and the harness-free grading bench."""
