"""What can be set about the operator's processes: flags and environment, parsed once into one frozen object.

The one rule: nothing else reads flags or the environment.
"""

import argparse
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

from trimtab_operator.injection.certificates import SECRET_NAME, CertificateMode
from trimtab_operator.install import Install
from trimtab_state.errors import ConfigError
from trimtab_state.store_url import parse_store_url

Command = Literal["run", "webhook"]
NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
IMAGE: Final = "trimtab"
ENVOY_IMAGE: Final = "envoyproxy/envoy:distroless-v1.40.0"
CERTIFICATE_MODES: Final[tuple[CertificateMode, ...]] = ("self", "certManager", "existingSecret")
PORT_MAX: Final = 65_535


class SettingsError(ValueError):
    """A flag is missing or makes no sense: say so and stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One process."""

    command: Command
    namespace: str
    """Where the operator itself runs."""
    store_url: str
    """The shared state, with rights to make users if pools are to have their own. Empty for a webhook."""
    namespaces: tuple[str, ...]
    """Where pools are looked for; empty: everywhere."""
    secret_name: str
    """Of the Secret with the install's secret."""
    picker_image: str
    sidecar_image: str
    envoy_image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    standalone: bool
    """What a policy's `standalone.enabled: null` means."""
    cluster_domain: str
    pods_listen: str
    """The address on which programs that cannot find out themselves listen in pods: all of IPv4, or of both families
    where the cluster's own is IPv6."""
    metrics_port: int
    """HTTP: /metrics, /healthz, /readyz. 0: any free one; which one is in the log."""
    bind: str | None
    elects_leader: bool
    identity: str
    """Of this replica."""
    webhook_port: int
    webhook_url: str
    """Where the API server is not to reach the webhook by its Service."""
    webhook_service: str
    certificate_mode: CertificateMode | None
    """Who keeps the webhook's certificate; None: there is no webhook."""
    certificate_secret: str
    makes_webhook_configuration: bool
    """False: the chart has made it, and the operator fills in nothing but whom the API server is to trust."""
    kubeconfig: str | None
    log_level: str


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises SettingsError; `--help` prints and exits."""
    options = _parser().parse_args(arguments)
    store_url = options.store or environment.get("TRIMTAB_STORE", "")
    if options.command == "run":
        if not store_url:
            raise SettingsError("--store (or TRIMTAB_STORE) is missing: the shared state's URL")
        try:
            parse_store_url(store_url)
        except ConfigError as error:
            raise SettingsError(f"--store (or TRIMTAB_STORE): {error}") from error
    namespace = options.operator_namespace or environment.get("POD_NAMESPACE", "") or _own_namespace()
    if not namespace:
        raise SettingsError("--operator-namespace (or POD_NAMESPACE) is missing: where the operator runs")
    return Settings(
        command=options.command,
        namespace=namespace,
        store_url=store_url,
        namespaces=tuple(dict.fromkeys(options.namespace or ())),
        secret_name=options.secret_name,
        picker_image=options.picker_image,
        sidecar_image=options.sidecar_image,
        envoy_image=options.envoy_image,
        image_pull_policy=options.image_pull_policy,
        image_pull_secrets=tuple(options.image_pull_secret or ()),
        standalone=options.standalone,
        cluster_domain=options.cluster_domain,
        pods_listen=_pods_listen(environment),
        metrics_port=options.metrics_port,
        bind=options.bind or None,
        elects_leader=options.leader_election,
        identity=environment.get("POD_NAME", "") or socket.gethostname(),
        webhook_port=options.webhook_port,
        webhook_url=options.webhook_url,
        webhook_service=options.webhook_service,
        certificate_mode=None if options.webhook_certificate == "none" else options.webhook_certificate,
        certificate_secret=options.webhook_certificate_secret,
        makes_webhook_configuration=options.webhook_configuration == "made",
        kubeconfig=options.kubeconfig,
        log_level=options.log_level,
    )


def install_of(settings: Settings, secret: bytes, cluster_uid: str = "") -> Install:
    """What the parts need to know of the installation."""
    return Install(
        namespace=settings.namespace,
        store_url=settings.store_url,
        secret=secret,
        cluster_uid=cluster_uid,
        picker_image=settings.picker_image,
        sidecar_image=settings.sidecar_image,
        envoy_image=settings.envoy_image,
        image_pull_policy=settings.image_pull_policy,
        image_pull_secrets=settings.image_pull_secrets,
        standalone_by_default=settings.standalone,
        cluster_domain=settings.cluster_domain,
        listen_address=settings.pods_listen,
    )


class _Parser(argparse.ArgumentParser):
    """Errors are SettingsErrors, which the caller reports."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}. See {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trimtab-operator",
        description="Trimtab's operator: runs the pickers of InferencePools and tells them who is in a pool.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "webhook"), default="run", help="run: the operator (default); webhook: "
        "the process that puts sidecars into pods")  # fmt: skip
    add("--store", default="", metavar="URL", help="the shared state's URL [TRIMTAB_STORE]")
    add("--operator-namespace", metavar="NAME", type=_name, help="where the operator runs [POD_NAMESPACE]")
    add("--namespace", action="append", metavar="NAME", type=_name, help="look for pools here only; may be repeated")
    add("--secret-name", default="trimtab-install", metavar="NAME", help="Secret with the install's secret; made where "
        "it is not there (default: trimtab-install)")  # fmt: skip
    add("--picker-image", default=IMAGE, metavar="IMAGE", help=f"of the pickers (default: {IMAGE})")
    add("--sidecar-image", default=IMAGE, metavar="IMAGE", help=f"of the sidecars (default: {IMAGE})")
    add("--envoy-image", default=ENVOY_IMAGE, metavar="IMAGE", help=f"of pools' Envoys (default: {ENVOY_IMAGE})")
    add("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"), default="IfNotPresent")
    add("--image-pull-secret", action="append", metavar="NAME", help="in each pool's namespace; may be repeated")
    add("--standalone", action=argparse.BooleanOptionalAction, default=True, help="pools whose policy does not say "
        "have an Envoy of their own (default: yes)")  # fmt: skip
    add("--cluster-domain", default="cluster.local", metavar="NAME", help="of the cluster's DNS")
    add("--metrics-port", type=_port, default=8080, help="HTTP /metrics, /healthz, /readyz (default: 8080; 0: any)")
    add("--bind", default="", metavar="ADDRESS", help="address to listen on (default: all)")
    add("--leader-election", action=argparse.BooleanOptionalAction, default=True, help="one replica of several works")
    add("--webhook-port", type=_port, default=9443, help="HTTPS of the webhook (default: 9443; 0: any)")
    add("--webhook-url", default="", metavar="URL", help="where the API server reaches the webhook, if not by Service")
    add("--webhook-service", default="trimtab-webhook", metavar="NAME", help="the webhook's Service")
    add("--webhook-certificate", choices=("none", *CERTIFICATE_MODES), default="self", help="who keeps the webhook's "
        "certificate (default: self, the operator); none: there is no webhook")  # fmt: skip
    add("--webhook-certificate-secret", default=SECRET_NAME, metavar="NAME", help="Secret with it")
    add("--webhook-configuration", choices=("made", "given"), default="made", help="made: with certificates of its own "
        "the operator makes the MutatingWebhookConfiguration (default); given: a chart does, and the operator puts its "
        "caBundle into it")  # fmt: skip
    add("--kubeconfig", metavar="FILE", help="how to reach the API server, outside a cluster [KUBECONFIG]")
    add("--log-level", type=str.lower, choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no port: give 0 to {PORT_MAX}")
    return int(text)


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace's name")
    return text


def _pods_listen(environment: Mapping[str, str]) -> str:
    """The API server's Service has an address of the family that pods and Services have first."""
    try:
        is_v6 = ipaddress.ip_address(environment.get("KUBERNETES_SERVICE_HOST", "").strip("[]")).version == 6
    except ValueError:
        is_v6 = False  # a name, or no cluster around us
    return "::" if is_v6 else "0.0.0.0"


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""
