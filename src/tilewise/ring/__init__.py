"""Attention over many devices. A schedule is a value: it can be proved, priced and run. `runs owners sight program teams
moves schedule formulas verify` are pure (NumPy only) and speak of rows, heads and ranks, never of tensors."""
