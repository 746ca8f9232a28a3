"""Any task source of insitu as an OpenEnv environment."""

from .client import InsituEnv

__all__ = ["InsituEnv"]
