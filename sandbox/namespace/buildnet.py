"""What a build with the host's network needs of the host: resolver, certificates, package index settings."""

from __future__ import annotations

import os
from collections.abc import Mapping

_FILES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
          "NODE_EXTRA_CA_CERTS")  # fmt: skip
_VALUES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT", "UV_INDEX_URL",
           "UV_DEFAULT_INDEX", "NPM_CONFIG_REGISTRY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
           "https_proxy", "no_proxy")  # fmt: skip


def passage(
    network: str, environment: Mapping[str, str] = os.environ
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], dict[str, str]]:
    """(files bound below /run, files bound over /etc, variables) for a sandbox with that network."""
    if network != "host":
        return [], [], {}
    run: list[tuple[str, str]] = []
    variables = {name: environment[name] for name in _VALUES if environment.get(name)}
    for name in _FILES:
        path = os.path.realpath(environment.get(name) or "")
        if environment.get(name) and os.path.isfile(path):
            run.append((path, f"certificates/{name}.pem"))
            variables[name] = f"/run/certificates/{name}.pem"
    resolver = os.path.realpath("/etc/resolv.conf")
    etc = [(resolver, "/etc/resolv.conf")] if os.path.isfile(resolver) else []
    hosts = "/etc/hosts"
    if os.path.isfile(hosts):
        etc.append((hosts, hosts))
    return run, etc, variables
