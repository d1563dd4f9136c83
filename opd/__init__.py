"""On-policy distillation: full-vocabulary reverse KL from several teachers."""
