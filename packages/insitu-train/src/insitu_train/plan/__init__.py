"""The planner under its former name, for scripts that have it; leaves when the packages are split."""
