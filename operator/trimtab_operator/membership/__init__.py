"""Who is in a pool: its pods, as endpoints."""
