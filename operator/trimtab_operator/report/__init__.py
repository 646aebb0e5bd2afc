"""What a pool is told of: facts found out, conditions made of them, the status and Events that carry them."""
