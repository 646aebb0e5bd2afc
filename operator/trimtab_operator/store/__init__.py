"""The shared state's users: how the operator logs in, what each pool may do there."""
