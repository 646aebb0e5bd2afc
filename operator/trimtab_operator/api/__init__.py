"""Kubernetes objects as this operator sees them."""
