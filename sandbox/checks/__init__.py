"""The checks of `sandbox.check`, by kind. They use the contract alone, never a backend's own names."""
