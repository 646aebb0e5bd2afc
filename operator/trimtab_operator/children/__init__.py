"""What the operator makes for a pool: pure functions from pool, policy and installation to Kubernetes objects."""
