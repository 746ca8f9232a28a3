"""Train a language model in situ: inside the coding agent people really use. Start reading at attempt.py."""

__version__ = "0.1.0"
