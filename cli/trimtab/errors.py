"""Errors of the command line, by what the user does about them."""

from __future__ import annotations


class UsageError(Exception):
    """A flag or its surroundings must be changed; the message names the flag and the remedy."""
