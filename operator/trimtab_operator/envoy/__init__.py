"""The Envoy of a pool that has no other gateway: its configuration, and how it drains."""
