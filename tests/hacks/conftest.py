"""The image and the sandboxes of the verifiers' tests."""

from tests.verifiers.conftest import images, sandboxes

__all__ = ["images", "sandboxes"]
