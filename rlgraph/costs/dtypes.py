"""The bytes of the numbers that models, gradients and averages are made of."""

WIDTH = {"float32": 4, "bfloat16": 2}  # of a number
MASTER = 4  # of a trained weight, of its gradient, and of each of AdamW's two averages
