"""The five stage agents of the factory, in their deterministic form.

    specifier -> environment -> solvers -> inspector -> repairer -> (back to the environment) | accepted

Each is one class with one async method; `base.StageAgent` is the seam at which a model-driven one fits.
"""
