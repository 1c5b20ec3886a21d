"""Pictures of how a problem is computed, drawn from the same walk that the kernels follow."""
