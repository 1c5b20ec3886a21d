"""The readable spec: `plain` is the definition, `flash` the same by tiles. NumPy only; it never knows it is fast."""
