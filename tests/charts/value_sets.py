"""Sets of values that people install with: each has to render, and the API server to take every object of it."""

from typing import Any, Final

DIGEST: Final = f"sha256:{'0a' * 32}"
CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
TOLERATION: Final = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
POD: Final[dict[str, Any]] = {
    "podLabels": {"team": "serving"},
    "podAnnotations": {"example.com/note": "a"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [TOLERATION],
    "affinity": {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
            ]
        }
    },
    "priorityClassName": "system-cluster-critical",
}
PROCESS: Final[dict[str, Any]] = {
    **POD,
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "serviceAccount": {"create": True, "name": "own-name", "annotations": {"example.com/role": "arn"}},
}

VALUE_SETS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "everything": {
        "global": {"imageRegistry": "mirror.example.com:5000/hub", "imagePullSecrets": ["mirror"]},
        "commonLabels": {"team": "serving"},
        "commonAnnotations": {"example.com/owner": "serving"},
        "image": {"registry": "ghcr.io", "repository": "trimtab/trimtab", "digest": DIGEST, "pullPolicy": "Always"},
        "imagePullSecrets": ["registry"],
        "operator": {**PROCESS, "logLevel": "debug", "extraArgs": ["--bind=0.0.0.0"]},
        "webhook": {
            **PROCESS,
            "serviceAccount": {"create": True, "name": "own-webhook", "annotations": {}},
            "extraArgs": ["--bind=0.0.0.0"],
            "hostNetwork": True,
            "ports": {"https": 19443, "metrics": 18080},
            "timeoutSeconds": 5,
        },
        "store": {
            "valkey": {
                **POD,
                "sizing": {"pools": 4, "pods": 512, "blocksPerPod": 60_000},
                "auth": {"password": 'with "quotes" and \\'},
                "extraConfig": "loglevel notice",
                "resources": {"requests": {"cpu": 1}, "limits": {"memory": "4Gi"}},
            }
        },
        "networkPolicy": {"enabled": True, "apiServer": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
        "monitoring": {
            "podMonitor": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "scrapeTimeout": "5s",
                "relabelings": [{"action": "labeldrop", "regex": "pod_template_hash"}],
            },
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "labels": {"release": "prometheus"}, "alertLabels": {"team": "serving"}},
            "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Trimtab"}},
        },
    },
    "some namespaces": {
        "watchNamespaces": ["default", "kube-public"],
        "networkPolicy": {"enabled": True},
        "monitoring": {"podMonitor": {"enabled": True}, "dashboards": {"enabled": True}},
    },
    "other names": {"nameOverride": "tt", "fullnameOverride": "router", "installSecret": "router-install"},
    "cert-manager": {"webhook": {"certificate": {"mode": "certManager"}}},
    "cert-manager with an issuer": {
        "webhook": {
            "certificate": {
                "mode": "certManager",
                "existingSecret": "webhook-tls",
                "certManager": {"issuerRef": {"kind": "ClusterIssuer", "name": "ca"}},
            }
        }
    },
    "own certificate": {
        "webhook": {"certificate": {"mode": "existingSecret", "existingSecret": "webhook-tls", "caBundle": CERTIFICATE}}
    },
    "one replica, no webhook": {
        "operator": {"replicas": 1},
        "webhook": {"enabled": False},
        "pools": {"standalone": False},
        "monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
        "networkPolicy": {"enabled": True},
    },
    "store by Secret": {"store": {"mode": "external", "external": {"existingSecret": "redis-url"}}},
    "store by URL": {"store": {"mode": "external", "external": {"url": "rediss://u:p%40@redis.example.com:6380/2"}}},
    "sentinels": {
        "store": {
            "mode": "external",
            "external": {
                "topology": "sentinel",
                "hosts": ["s-0.redis:26379", "s-1.redis:26379"],
                "database": 1,
                "auth": {"username": "trim tab", "existingSecret": "redis", "existingSecretKey": "pass"},
                "sentinel": {"service": "mymaster", "username": "s", "existingSecret": "sentinels"},
                "tls": {"enabled": True, "caSecret": "redis-ca", "checkHostname": False},
            },
        }
    },
    "cluster": {
        "store": {
            "mode": "external",
            "external": {
                "topology": "cluster",
                "hosts": ["redis-0:6379", "[2001:db8::1]:6379"],
                "auth": {"password": "p@ss"},
                "tls": {"enabled": True, "verify": False},
            },
        }
    },
    "own accounts, no roles, no kinds": {
        "rbac": {"create": False},
        "crds": {"inferencePool": "never", "schedulingPolicy": "never"},
        "operator": {"serviceAccount": {"create": False, "name": "mine"}},
        "webhook": {"serviceAccount": {"create": False}},
        "store": {"valkey": {"auth": {"existingSecret": "valkey"}}},
    },
}
