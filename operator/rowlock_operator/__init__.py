"""The Kubernetes side of rowlock: it translates resources into rows and decides nothing itself."""

from importlib.metadata import version

__version__ = version("rowlock")
