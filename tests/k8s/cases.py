"""The values that the chart is tested with: every example, and every switch by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.k8s.helm import CHART

Values = dict[str, Any]

EXAMPLES: dict[str, Values] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((CHART / "examples").glob("*.yaml"))
}

MODELS: Values = {
    "target": {"model": {"from": "pvc", "claim": "models", "path": "large"}},
    "draft": {"model": {"from": "pvc", "claim": "models", "path": "small"}},
}
"""The least that must be set."""


def over(base: Values, *overlays: Values) -> Values:
    """Values laid over one another, mapping by mapping."""
    merged = dict(base)
    for overlay in overlays:
        for key, value in overlay.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = over(merged[key], value) if both else value
    return merged


def _block(first: str) -> str:
    """The YAML block of docs/deploy.md that begins with these words."""
    text = (CHART.parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")
    (block,) = [part for part in text.split("```yaml\n") if part.startswith(first)]
    return block.partition("```")[0]


_LABELS: Values = {"app.kubernetes.io/managed-by": "Helm"}
_ALONE: dict[str, Values] = {
    "no-draft": {"draft": {"enabled": False}},
    "no-draft-in-one-pod": {"draft": {"enabled": False}, "placement": "samePod"},
    "same-node": {"placement": "sameNode"},
    "same-node-with-own-affinity": {
        "placement": "sameNode",
        "target": {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
    },
    "same-pod": {"placement": "samePod"},
    "three-coordinators": {"coordinator": {"replicas": 3}},
    "nobody": {"common": {"replicas": 0}},
    "digest": {"common": {"image": {"digest": f"sha256:{'0' * 64}"}}},
    "mig": {"draft": {"gpuResource": "nvidia.com/mig-1g.10gb"}},
    "tokenizer": {"coordinator": {"model": {"from": "hostPath", "hostPath": "/models", "path": "tokenizer"}}},
    "download-into-the-pod": {
        "draft": {"model": {"from": "download", "path": "", "claim": "", "download": {"repository": "own/er"}}}
    },
    "buckets": {
        "target": {
            "model": {
                "from": "download",
                "path": "",
                "claim": "",
                "download": {
                    "url": "s3://weights/llama/8b",
                    "credentialsSecret": "s3",
                    "resources": {"limits": {"memory": "2Gi"}},
                },
            },
            "env": [{"name": "AWS_ENDPOINT_URL", "value": "http://minio.storage:9000"}],
        },
        "draft": {
            "model": {"from": "download", "path": "", "claim": "", "download": {"url": "gs://weights/llama/8b"}},
            "serviceAccount": {
                "annotations": {"iam.gke.io/gcp-service-account": "models@project.iam.gserviceaccount.com"}
            },
        },
        "coordinator": {
            "model": {"from": "download", "download": {"url": "s3://weights/llama/8b/", "timeoutSeconds": 60}}
        },
    },
    "model-images": {
        "target": {
            "model": {
                "from": "oci",
                "claim": "",
                "path": "models",
                "oci": {"reference": "registry.example.com/llama:8b"},
            }
        },
        "draft": {
            "model": {
                "from": "oci",
                "claim": "",
                "path": "",
                "oci": {"reference": f"registry.example.com/small@sha256:{'1' * 64}", "pullPolicy": "Always"},
            }
        },
        "imagePullSecrets": ["registry", {"name": "models"}],
    },
    "shared-gpus": {
        "placement": "samePod",
        "sharedGpus": {"enabled": True, "selectors": ["device.attributes['gpu.nvidia.com'].productName == 'H200'"]},
        "target": {"settings": {"gpu_memory_utilization": 0.7}},
        "draft": {"settings": {"gpu_memory_utilization": 0.2}},
    },
    "common-labels": {
        "commonLabels": {"team": "search", "cost-centre": "7"},
        "common": {"podLabels": {"team": "chat"}},
        "metrics": {"rules": {"enabled": True, "labels": {"team": "alerts"}}, "serviceMonitor": {"enabled": True}},
    },
    "strategy": {
        "target": {"strategy": {"type": "Recreate"}},
        "coordinator": {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "50%"}}},
    },
    "host-network": {"target": {"hostNetwork": True}, "draft": {"hostNetwork": True}},
    "host-network-of-coordinators": {"coordinator": {"hostNetwork": True}, "networkPolicy": {"enabled": False}},
    "node-ports": {
        "service": {
            "type": "NodePort",
            "nodePort": 30051,
            "externalTrafficPolicy": "Local",
            "http": {"type": "NodePort", "nodePort": 30080},
        },
    },
    "vllm-names": {"metrics": {"vllmNames": True}},
    "no-gateway": {"gateway": {"enabled": False}},
    "gateway": {"gateway": {"replicas": 2, "settings": {"served_model_name": "llama", "max_body_bytes": 1_000_000}}},
    "http-route": {
        "httpRoute": {
            "enabled": True,
            "hostnames": ["m.example.com"],
            "parentRefs": [{"name": "public"}],
            "path": "/llama",
            "timeouts": {"request": "0s"},
        },
    },
    "ingress-of-all-hosts": {"ingress": {"enabled": True, "tls": [{"hosts": ["a.example.com"], "secretName": "a"}]}},
    "scaled-gateway": {
        "gateway": {"enabled": True, "autoscaling": {"enabled": True, "maxReplicas": 8, "cpuPercent": 50}}
    },
    "direct-channels": {"directChannels": {"enabled": True}},
    "direct-channels-with-tls": {
        "directChannels": {"enabled": True},
        "tls": {"enabled": True, "certManager": {"enabled": True, "issuer": {"name": "ca"}}},
        "tokens": {"links": {"name": "links", "key": "token"}},
    },
    "direct-channels-in-one-pod": {"directChannels": {"enabled": True}, "placement": "samePod"},
    "drafts-by-a-query": {
        "draft": {"autoscaling": {"enabled": True, "query": 'sum(outrider_sessions_open{role="draft"})'}}
    },
    "settings": {
        "common": {"settings": {"log_level": "debug"}},
        "target": {"settings": {"kv_cache_bytes": 20_000_000_000}},
        "coordinator": {"settings": {"disable_logprobs": True, "posterior_alpha": 0.25}},
    },
    "long-drain": {"common": {"drain": {"preStopSeconds": 20, "delaySeconds": 2.5, "graceSeconds": 600}}},
    "no-pdb": {"common": {"pdb": {"enabled": False}}},
    "pdb-percent": {"coordinator": {"pdb": {"maxUnavailable": "25%"}}},
    "no-spread": {"common": {"topologySpread": {"enabled": False}}},
    "head": {"draft": {"settings": {"method": "eagle3", "target_model": "/models/large"}}},
    "keda": {"target": {"autoscaling": {"enabled": True, "kind": "keda", "authentication": "prometheus"}}},
    "hpa": {"target": {"autoscaling": {"enabled": True, "kind": "hpa"}}},
    "hpa-of-coordinators": {"coordinator": {"autoscaling": {"enabled": True, "kind": "hpa"}}},
    "hpa-of-a-group": {
        "target": {"tensorParallelSize": 2, "hosts": 2, "autoscaling": {"enabled": True, "kind": "hpa"}}
    },
    "no-network-policy": {"networkPolicy": {"enabled": False}},
    "network-peers": {
        "networkPolicy": {
            "users": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "collector": [{"namespaceSelector": {"matchLabels": {"name": "observability"}}}],
            "extraEgress": [{"ports": [{"port": 8200, "protocol": "TCP"}]}],
        },
        "tracing": {"endpoint": "https://collector.observability:443"},
    },
    "no-metrics": {"metrics": {"enabled": False}},
    "monitors": {
        "metrics": {
            "serviceMonitor": {"enabled": True},
            "rules": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "runbookUrl": "https://docs.example.com/operations",
            },
            "dashboard": {"enabled": True},
        }
    },
    "tracing": {
        "tracing": {"endpoint": "http://c:4317", "headersSecret": {"name": "otlp", "key": "headers"}},
    },
    "given-certificates": {
        "tls": {
            "enabled": True,
            "users": {"required": True, "caSecret": {"name": "users-ca", "key": "ca.crt"}},
            "secrets": {"coordinator": "c-tls", "target": "t-tls", "draft": "d-tls", "gateway": "g-tls"},
        }
    },
    "tls-in-one-pod": {
        "placement": "samePod",
        "tls": {"enabled": True, "certManager": {"enabled": True, "issuer": {"name": "ca"}}},
        "tokens": {"links": {"name": "links", "key": "token"}},
    },
    "one-claim-for-both": {
        "common": {"model": {"createClaim": {"enabled": True, "storageClass": "fast"}}},
        "coordinator": {"model": {"claim": "models"}},
    },
    "route": {"route": {"enabled": True, "hostnames": ["m.example.com"], "parentRefs": [{"name": "public"}]}},
    "load-balancer": {
        "service": {
            "type": "LoadBalancer",
            "annotations": {"a": "b"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
            "http": {
                "type": "LoadBalancer",
                "loadBalancerSourceRanges": ["10.1.0.0/16"],
                "loadBalancerClass": "example.com/lb",
            },
        }
    },
    "own-security": {
        "common": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
        "target": {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
    },
    "own-service-accounts": {"common": {"serviceAccount": {"create": False}}},
    "pod-extras": {
        "common": {
            "podLabels": {"team": "chat"},
            "podAnnotations": {"note": "yes"},
            "extraContainers": [{"name": "proxy", "image": "busybox:1.37"}],
            "extraInitContainers": [{"name": "first", "image": "busybox:1.37"}],
            "priorityClassName": "serving",
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"disk": "ssd"},
            "annotations": {"owner": "chat"},
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "envFrom": [{"secretRef": {"name": "more"}}],
            "extraVolumes": [{"name": "extra", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        },
        "target": {"extraInitContainers": [{"name": "warm", "image": "busybox:1.37"}]},
        "draft": {"extraContainers": [{"name": "beside", "image": "busybox:1.37"}]},
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-more", "labels": _LABELS},
            }
        ],
        "image": {"pullSecrets": [{"name": "registry"}]},
    },
}
_ALONE["ingress-of-grpc"] = yaml.safe_load(_block("extraObjects:"))
SWITCHES = {name: over(MODELS, values) for name, values in _ALONE.items()}

_LOOKUP: Values = {"draft": {"model": {"from": "none"}, "settings": {"method": "ngram"}}}

# On CPUs, for starting them here; a draft without a model starts sooner.
STARTED: dict[str, Values] = {
    "cpu-with-tls": over(
        EXAMPLES["cpu-demo"],
        _LOOKUP,
        {
            "tls": {
                "enabled": True,
                "users": {"required": True},
                "secrets": {"coordinator": "c", "target": "t", "draft": "d", "gateway": "g"},
            },
            "tokens": {"api": {"name": "users", "key": "tokens"}, "links": {"name": "links", "key": "token"}},
        },
    ),
    "cpu-in-one-pod": over(EXAMPLES["cpu-demo"], _LOOKUP, {"placement": "samePod"}),
    "two-hosts": over(
        EXAMPLES["multi-host"],
        {"target": {"tensorParallelSize": 2, "model": {"path": "target"}, "settings": {"num_pages": 256}}},
    ),
}

_CERT_MANAGER: Values = {"tls": {"enabled": True, "certManager": {"enabled": True, "issuer": {"name": "ca"}}}}
_TOKENS: Values = {"tokens": {"api": {"name": "users", "key": "tokens"}, "links": {"name": "links", "key": "token"}}}
_WATCHED: Values = {
    "metrics": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboard": {"enabled": True}},
    "tracing": {"endpoint": "http://collector.observability:4317"},
}
_AUTHORITY: Values = {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "cluster-ca"}]}
_USERS: Values = {"networkPolicy": {"users": [{"podSelector": {"matchLabels": {"app": "chat"}}}]}}

TOGETHER: dict[str, Values] = {
    "all-in-one-pod": over(
        SWITCHES["pod-extras"], _CERT_MANAGER, _TOKENS, _WATCHED, _USERS,
        {
            "placement": "samePod",
            "tls": {"users": {"required": True}},
            "target": {"replicas": 2, "tensorParallelSize": 4, "autoscaling": {"enabled": True}},
        },
    ),
    "all-spread": over(
        SWITCHES["pod-extras"], _CERT_MANAGER, _TOKENS, _WATCHED, _USERS,
        {
            "common": {"replicas": 2},
            "target": {"autoscaling": {"enabled": True, "kind": "hpa"}},
            "coordinator": {"autoscaling": {"enabled": True, "kind": "hpa"}},
            "gateway": {"autoscaling": {"enabled": True}},
            "tls": {"users": {"required": True, "caSecret": {"name": "users-ca", "key": "ca.crt"}}},
            "route": {"enabled": True, "parentRefs": [{"name": "public"}], "backendTLS": _AUTHORITY},
        },
    ),
    "https-ingress": over(
        MODELS, _CERT_MANAGER, {"ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "b"}}}
    ),
    "https-route": over(
        MODELS, _CERT_MANAGER, _TOKENS,
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "backendTLS": _AUTHORITY}},
    ),
    "hosts-with-tls": over(
        EXAMPLES["multi-host"], _CERT_MANAGER, _TOKENS, _WATCHED, _USERS,
        {"target": {"replicas": 2, "autoscaling": {"enabled": True}}},
    ),
    "downloads-in-one-pod": over(
        {service: {"model": {"from": "download", "download": {"repository": f"own/{service}"}}}
         for service in ("target", "draft", "coordinator")},
        {"placement": "samePod"},
    ),
    "host-paths-on-one-node": over(
        {service: {"model": {"from": "hostPath", "hostPath": "/data", "path": service}}
         for service in ("target", "draft")},
        {"placement": "sameNode", "common": {"replicas": 2}},
    ),
    "lookup-on-one-node": over(EXAMPLES["lookup"], {"placement": "sameNode"}),
    "cpu-on-one-node": over(EXAMPLES["cpu-demo"], {"placement": "sameNode"}),
}  # fmt: skip
"""Switches that act on one another."""

ALL: dict[str, Values] = {**EXAMPLES, **SWITCHES, **STARTED, **TOGETHER}


def golden_file(name: str) -> Path:
    """Path of an example's golden render."""
    return Path(__file__).parent / "golden" / f"{name}.yaml"
