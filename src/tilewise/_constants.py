"""Numbers the algorithm needs and nobody should type twice."""

LOG2_E = 1.4426950408889634  # log2(e): exp(x) == exp2(x * LOG2_E)
LN_2 = 0.6931471805599453  # ln(2): natural log == log2 * LN_2
