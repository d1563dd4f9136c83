"""The variables by which programs in a sandbox find the proxy and the package index."""

from __future__ import annotations

from sandbox.base import NetworkPolicy

PORT = 3128
"""Where the proxy listens on the sandbox's loopback."""
_LOCAL = "127.0.0.1,localhost,::1"


def variables(policy: NetworkPolicy, port: int = PORT) -> dict[str, str]:
    """Empty unless the policy lets something be reached."""
    if policy.mode != "allow":
        return {}
    here = f"http://127.0.0.1:{port}"
    found = {"no_proxy": _LOCAL, "NO_PROXY": _LOCAL}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "npm_config_proxy"):
        found[name] = here
    if policy.index_before is not None:
        found |= dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), f"{here}/simple/")
        found["npm_config_registry"] = f"{here}/npm/"
        found["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return found
