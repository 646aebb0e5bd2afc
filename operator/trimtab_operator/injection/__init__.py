"""The sidecar, put into the pods of pools that ask for it, as they are created."""
