"""whet trains a language model inside the coding agent people really use. Start reading at rollout.py."""

__version__ = "0.1.0"
