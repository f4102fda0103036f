"""Sets of values that the chart has to take: each feature alone, and everything at once."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final, cast

Values = dict[str, Any]

BASE: Final[Values] = {
    "database": {"existingSecret": "pg-app"},
    "workers": {"image": {"repository": "registry.example/jobs"}},
}
"""The least that an installation says: where the database is, and an image with jobs."""

DEMO: Final[Values] = {"demo": {"postgres": {"enabled": True}}}

HOST: Final[Values] = {
    "database": {
        "host": "db.example",
        "port": 6432,
        "name": "work",
        "users": {
            role: {"name": f"jobs_{role}", "passwordSecret": {"name": f"pw-{role}"}}
            for role in ("owner", "node", "operator", "reader")
        },
    },
    "workers": BASE["workers"],
}

PEER: Final[Values] = {"podSelector": {"matchLabels": {"app": "x"}}}

# Everything that a pod can have.
POD: Final[Values] = {
    "env": [{"name": "TZ", "value": "UTC"}],
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "volumes": [{"name": "data", "emptyDir": {}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "initContainers": [{"name": "before", "image": "before:1"}],
    "extraContainers": [{"name": "beside", "image": "beside:1"}],
    "podLabels": {"team": "billing"},
    "podAnnotations": {"note": "mine"},
    "podSecurityContext": {"fsGroup": 2000},
    "securityContext": {"runAsUser": 1000},
    "nodeSelector": {"disk": "fast"},
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "tolerations": [{"key": "batch", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "low",
    "runtimeClassName": "gvisor",
    "schedulerName": "volcano",
    "hostUsers": False,
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["bank"]}],
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.2"]},
    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
    "tmp": {"sizeLimit": "1Gi"},
    "livenessProbe": {"periodSeconds": 33},
    "readinessProbe": {"periodSeconds": 34},
    "startupProbe": {"periodSeconds": 35},
}


def with_values(base: Values, **more: Any) -> Values:
    """Values laid over others, maps into maps."""
    return _laid_over(base, more)


def of_pool(**values: Any) -> Values:
    """BASE, and these values in its pool `default`."""
    return with_values(BASE, workers={"pools": {"default": values}})


def _laid_over(base: Values, more: Values) -> Values:
    merged = deepcopy(base)
    for name, value in more.items():
        below: Any = merged.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[name] = _laid_over(cast(Values, below), cast(Values, value))
        else:
            merged[name] = deepcopy(cast(object, value))
    return merged


CASES: Final[dict[str, Values]] = {
    "least": BASE,
    "demo": DEMO,
    "demo with everything around": with_values(
        DEMO,
        networkPolicy={"enabled": True},
        exporter={"replicas": 2},
        operator={"replicas": 2},
        tests={"timeoutSeconds": 60},
    ),
    "host and users": HOST,
    "host and users, scaled by KEDA": with_values(
        HOST, workers={"autoscaling": {"type": "keda", "minReplicas": 0}}
    ),
    "a secret for each role": with_values(
        BASE,
        database={
            "secrets": {role: {"name": f"pg-{role}"} for role in ("owner", "node", "operator")},
            "work": {"existingSecret": "pg-work"},
        },
    ),
    "certificates": with_values(
        BASE,
        database={"tls": {"caSecret": {"name": "pg-ca"}, "certSecret": {"name": "pg-client"}}},
        podDefaults={"podSecurityContext": {"fsGroup": 65532}},
    ),
    "migrations in the pods": with_values(BASE, migrations={"mode": "initContainer"}),
    "no migrations": with_values(BASE, migrations={"enabled": False}),
    "every knob of every pod": with_values(BASE, podDefaults=POD),
    "every knob of a pool": of_pool(**POD),
    "several pools": with_values(
        BASE,
        workers={"pools": {"fast": {"slots": 8, "replicas": 1}, "slow": {"drainSeconds": 5}}},
    ),
    "no pools": with_values(BASE, workers={"pools": {"default": None}}),
    "hpa": of_pool(
        autoscaling={
            "type": "hpa",
            "hpa": {
                "metrics": [
                    {
                        "type": "Resource",
                        "resource": {
                            "name": "cpu",
                            "target": {"type": "Utilization", "averageUtilization": 80},
                        },
                    }
                ]
            },
        }
    ),
    "keda by the database": of_pool(autoscaling={"type": "keda", "minReplicas": 0}),
    "keda by Prometheus": of_pool(
        autoscaling={
            "type": "keda",
            "keda": {
                "trigger": "prometheus",
                "serverAddress": "http://prometheus:9090",
                "fallback": {"failureThreshold": 3, "replicas": 2},
                "triggers": [{"type": "cron", "metadata": {}}],
            },
        }
    ),
    "one namespace": with_values(BASE, rbac={"scope": "namespace"}, crds={"enabled": False}),
    "two namespaces": with_values(
        BASE, rbac={"scope": "namespace"}, operator={"watchNamespaces": ["a", "b"]}
    ),
    "no rights of ours": with_values(
        BASE, rbac={"create": False}, operator={"serviceAccount": {"create": False, "name": "op"}}
    ),
    "no operator": with_values(BASE, operator={"enabled": False}),
    "monitoring": with_values(
        BASE,
        metrics={
            kind: {"enabled": True, "labels": {"release": "prom"}, "interval": "15s"}
            for kind in ("serviceMonitor", "podMonitor")
        },
    ),
    "alerts": with_values(
        BASE, metrics={"prometheusRule": {"enabled": True, "labels": {"release": "prom"}}}
    ),
    "dashboards": with_values(
        BASE, grafana={"dashboards": {"enabled": True, "namespace": "grafana"}}
    ),
    "network policies": with_values(
        BASE,
        networkPolicy={
            "enabled": True,
            "metricsFrom": [PEER],
            "database": [PEER],
            "dns": [PEER],
            "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
            "workersEgress": [{"to": [PEER], "ports": [{"port": 443}]}],
        },
    ),
    "names and labels": with_values(
        BASE,
        nameOverride="batch",
        namespaceOverride="elsewhere",
        commonLabels={"team": "billing"},
        commonAnnotations={"owner": "billing"},
        imagePullSecrets=[{"name": "registry"}],
    ),
    "images by digest": with_values(
        BASE,
        image={"registry": "registry.example", "digest": f"sha256:{'a' * 64}"},
        workers={"image": {"digest": f"sha256:{'b' * 64}", "pullPolicy": "Always"}},
    ),
    "objects of the user's": with_values(
        BASE,
        extraObjects=[
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}\n",
        ],
    ),
    "under a parent chart": with_values(BASE, enabled=True, **{"global": {"anything": [1, 2]}}),
}
