"""The network, its optimizers and checkpoints, and the policy interface that engines and trainers share."""
