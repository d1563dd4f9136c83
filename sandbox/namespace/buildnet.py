"""What a build with the host's network needs of the host: resolver, certificates, package index settings.

Only the variables named here pass, and only into sandboxes with `network="host"`. A value that is a file or
folder of the host is shown read-only below /run/host, and the variable points there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT", "PIP_FIND_LINKS",
    "PIP_CONSTRAINT", "PIP_CERT", "PIP_DISABLE_PIP_VERSION_CHECK", "UV_INDEX_URL", "UV_DEFAULT_INDEX",
    "UV_INDEX", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "NPM_CONFIG_REGISTRY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


def passage(
    network: str, environment: Mapping[str, str] = os.environ
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], dict[str, str]]:
    """(what is bound below /run, what is bound over /etc, variables) for a sandbox with that network."""
    if network != "host":
        return [], [], {}
    shown: list[tuple[str, str]] = []
    variables = {name: environment[name] for name in VARIABLES if environment.get(name)}
    for name, value in variables.items():
        if value.startswith("/") and os.path.exists(value):
            shown.append((os.path.realpath(value), f"host/{name}"))
            variables[name] = f"/run/host/{name}"
    etc = [
        (os.path.realpath(path), path) for path in ("/etc/resolv.conf", "/etc/hosts") if os.path.isfile(path)
    ]
    return shown, etc, variables
