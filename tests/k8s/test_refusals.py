"""Values that make no sense are refused before anything reaches a cluster, with a message that names the key."""

from __future__ import annotations

import pytest

from tests.k8s.cases import MODELS, Values, over
from tests.k8s.helm import Helm, RefusedError

TLS: Values = {"tls": {"enabled": True, "secrets": {"coordinator": "c", "target": "t", "draft": "d", "gateway": "g"}}}

REFUSED: dict[str, tuple[Values, str]] = {
    "nothing set": ({"target": {"model": {"from": "none"}}}, "target.model.from: the large model is not set"),
    "a name that no Service can have": (
        {"fullnameOverride": "4plus1"},
        'fullnameOverride: "4plus1" cannot be the name of a Service',
    ),
    "no draft model": ({"draft": {"model": {"from": "none"}}}, "draft.model.from: the small model is not set"),
    "a key misspelt": ({"traget": {"replicas": 2}}, "additional properties 'traget' not allowed"),
    "a key of a block misspelt": (
        {"target": {"replica": 2}},
        "at '/target': additional properties 'replica' not allowed",
    ),
    "a placement that is none": (
        {"placement": "together"},
        "at '/placement': value must be one of 'spread', 'sameNode', 'samePod'",
    ),
    "a replica less than none": ({"target": {"replicas": -1}}, "at '/target/replicas': minimum: got -1, want 0"),
    "replicas in words": ({"target": {"replicas": "two"}}, "at '/target/replicas': got string, want integer"),
    "a port out of range": ({"draft": {"port": 70000}}, "at '/draft/port': maximum: got 70,000, want 65,535"),
    "a privileged port": ({"coordinator": {"port": 80}}, "at '/coordinator/port': minimum: got 80, want 1,024"),
    "a device that is none": (
        {"target": {"device": "tpu"}},
        "at '/target/device': value must be one of 'cuda', 'cpu', 'none'",
    ),
    "a target without a device": (
        {"target": {"device": "none"}},
        "target.device: is none; a model runs on cuda or cpu",
    ),
    "a coordinator with a GPU": (
        {"coordinator": {"device": "cuda"}},
        "coordinator.device: is cuda; the coordinator runs no model",
    ),
    "no degree": ({"target": {"tensorParallelSize": 0}}, "at '/target/tensorParallelSize': minimum: got 0, want 1"),
    "an odd share": (
        {"target": {"tensorParallelSize": 5, "hosts": 2}},
        "target.tensorParallelSize: 5 GPUs cannot be shared out evenly over hosts=2",
    ),
    "a draft over hosts": (
        {"draft": {"tensorParallelSize": 2, "hosts": 2}},
        "draft.hosts: is 2; only the target runs on several hosts",
    ),
    "hosts in one pod": (
        {"placement": "samePod", "target": {"tensorParallelSize": 2, "hosts": 2}},
        "target.hosts: is 2 with placement=samePod",
    ),
    "hosts on one node": (
        {"placement": "sameNode", "target": {"tensorParallelSize": 2, "hosts": 2}},
        "target.hosts: is 2 with placement=sameNode",
    ),
    "hosts of CPUs": (
        {"target": {"device": "cpu", "tensorParallelSize": 2, "hosts": 2}},
        "target.hosts: is 2 with device=cpu",
    ),
    "one port twice in a pod": (
        {"placement": "samePod", "draft": {"metricsPort": 9465}},
        "9465 is draft.metricsPort too",
    ),
    "one port twice in a container": (
        {"coordinator": {"metricsPort": 50050}},
        "coordinator: port 50050, metricsPort 50050 and healthPort 8080 must be three different ports",
    ),
    "one port twice in a gateway": (
        {"gateway": {"metricsPort": 8000}},
        "gateway.metricsPort: is 8000, as gateway.port is; they must be different ports",
    ),
    "a pod's key of another block": (
        {"placement": "samePod", "coordinator": {"replicas": 2}},
        "coordinator.replicas: belongs to the pod, which is the target's with placement=samePod; set target.replicas",
    ),
    "a GPU to look things up": (
        {"draft": {"model": {"from": "none"}, "settings": {"method": "ngram"}}},
        "draft.device: is cuda; looking guesses up (draft.settings.method=ngram) needs no GPU",
    ),
    "a claim without a name": (
        {"target": {"model": {"claim": ""}}},
        "target.model.claim: is needed with model.from=pvc",
    ),
    "a host path that is not absolute": (
        {"draft": {"model": {"from": "hostPath", "hostPath": "models"}}},
        "at '/draft/model/hostPath'",
    ),
    "a download of nothing": ({"draft": {"model": {"from": "download"}}}, "draft.model.download.repository: is needed"),
    "a way out of the volume": ({"draft": {"model": {"path": "../secret"}}}, "at '/draft/model/path'"),
    "a path from the root": (
        {"draft": {"model": {"path": "/secret"}}},
        'draft.model.path: "/secret" should be relative',
    ),
    "a setting of the chart's own": (
        {"target": {"settings": {"port": 1}}},
        "target.settings.port: is set by target.port",
    ),
    "a setting misspelt": (
        {"target": {"settings": {"page_sise": 16}}},
        "target.settings.page_sise: the target has no such setting",
    ),
    "a setting for all that one does not have": (
        {"common": {"settings": {"num_threads": 1}}},
        "coordinator.settings.num_threads: the coordinator has no such setting",
    ),
    "an address as a setting": (
        {"coordinator": {"settings": {"target_address": "x:1"}}},
        "coordinator.settings.target_address: is the chart's own",
    ),
    "a setting with a dash": ({"target": {"settings": {"page-size": 1}}}, "page-size"),
    "a setting that is a list": (
        {"target": {"settings": {"page_size": [1]}}},
        "at '/target/settings/page_size': got array",
    ),
    "a share above one": ({"tracing": {"samplingRatio": 2}}, "at '/tracing/samplingRatio': maximum: got 2, want 1"),
    "an endpoint without a scheme": ({"tracing": {"endpoint": "collector:4317"}}, "at '/tracing/endpoint'"),
    "an endpoint without a port": (
        {"tracing": {"endpoint": "http://collector/v1"}},
        "tracing.endpoint: http://collector/v1 has no port; a collector listens on 4317",
    ),
    "fewer at most than at least": (
        {"target": {"autoscaling": {"minReplicas": 5}}},
        "target.autoscaling.minReplicas: 5 is above maxReplicas 4",
    ),
    "scaling without metrics": (
        {"target": {"autoscaling": {"enabled": True}}, "metrics": {"enabled": False}},
        "target.autoscaling.enabled: scaling is on requests that run or wait",
    ),
    "drafts scaled on requests, which they do not change": (
        {"common": {"autoscaling": {"enabled": True, "kind": "hpa"}}},
        "draft.autoscaling.kind: is hpa, on how many requests run or wait; more drafts do not change that",
    ),
    "drafts of its own and of another release": (
        {"draft": {"address": "pool-outrider-draft:50052"}},
        "draft.address: is pool-outrider-draft:50052, a draft of another release; set draft.enabled=false",
    ),
    "channels between hosts as a setting": (
        {"coordinator": {"settings": {"channels_between_hosts": True}}},
        "coordinator.settings.channels_between_hosts: is the chart's own; see placement, directChannels",
    ),
    "more requests a replica than run on it": (
        {
            "target": {"autoscaling": {"enabled": True, "requestsPerReplica": 128}},
            "coordinator": {"settings": {"max_running_requests": 64}},
        },
        "target.autoscaling.requestsPerReplica: 128 should be below coordinator.settings.max_running_requests 64",
    ),
    "as many requests a replica as run by default": (
        {"target": {"autoscaling": {"enabled": True, "requestsPerReplica": 256}}},
        "target.autoscaling.requestsPerReplica: 256 should be below coordinator.settings.max_running_requests 256",
    ),
    "a served name in the wrong block": (
        {"coordinator": {"settings": {"served_model_name": "mine"}}},
        "the coordinator has no such setting; draft.settings, gateway.settings, target.settings take it",
    ),
    "a runbook that is no URL": (
        {"metrics": {"rules": {"runbookUrl": "docs/operations.md"}}},
        "at '/metrics/rules/runbookUrl': 'docs/operations.md' does not match pattern",
    ),
    "a query for the autoscaler of Kubernetes": (
        {"target": {"autoscaling": {"enabled": True, "kind": "hpa", "query": "sum(x)"}}},
        "target.autoscaling.query: is asked by KEDA; kind is hpa",
    ),
    "GPUs scaled on processor time": (
        {"target": {"autoscaling": {"enabled": True, "kind": "cpu"}}},
        "target.autoscaling.kind: is cpu with device=cuda",
    ),
    "processor time of nothing": (
        {"coordinator": {"autoscaling": {"enabled": True, "kind": "cpu"}, "resources": {"requests": {"cpu": None}}}},
        "coordinator.resources.requests.cpu: is needed with autoscaling.kind=cpu",
    ),
    "the trigger of before": (
        {"target": {"autoscaling": {"waitingPerReplica": 4}}},
        "at '/target/autoscaling': additional properties 'waitingPerReplica' not allowed",
    ),
    "a strategy for a group": (
        {"target": {"tensorParallelSize": 2, "hosts": 2, "strategy": {"type": "Recreate"}}},
        "target.strategy: is a Deployment's; with hosts=2 the target is a LeaderWorkerSet",
    ),
    "a strategy that is none": ({"target": {"strategy": {"type": "BlueGreen"}}}, "at '/target/strategy/type'"),
    "a strategy of another block's pod": (
        {"placement": "samePod", "draft": {"strategy": {"type": "Recreate"}}},
        "draft.strategy: belongs to the pod",
    ),
    "the node's network behind a policy": (
        {"coordinator": {"hostNetwork": True}},
        "coordinator.hostNetwork: its pods call from the node's address",
    ),
    "a node port of a cluster's own address": (
        {"service": {"nodePort": 30051}},
        "service.nodePort: is 30051 with service.type=ClusterIP",
    ),
    "a node port of the gateway's": (
        {"service": {"http": {"nodePort": 30080}}},
        "service.http.nodePort: is 30080 with service.http.type=ClusterIP",
    ),
    "ranges without a balancer": (
        {"service": {"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}},
        "service.loadBalancerSourceRanges: is set with service.type=NodePort",
    ),
    "a range that is none": (
        {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0"]}},
        "at '/service/loadBalancerSourceRanges/0'",
    ),
    "a label of the chart's own": (
        {"commonLabels": {"app.kubernetes.io/name": "mine"}},
        "commonLabels.app.kubernetes.io/name: is a label of the chart's own",
    ),
    "an Ingress to no gateway": (
        {"gateway": {"enabled": False}, "ingress": {"enabled": True}},
        "ingress.enabled: leads to the gateway's HTTP; gateway.enabled is false",
    ),
    "an HTTPRoute to no gateway": (
        {"gateway": {"enabled": False}, "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        "httpRoute.enabled: leads to the gateway's HTTP; gateway.enabled is false",
    ),
    "an HTTPRoute from nowhere": (
        {"httpRoute": {"enabled": True}},
        "httpRoute.parentRefs: is needed with httpRoute.enabled",
    ),
    "an HTTPRoute to pods whose certificate nobody knows": (
        {**TLS, "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        "httpRoute.backendTLS.caCertificateRefs: is needed with httpRoute.enabled and tls.enabled",
    ),
    "a GRPCRoute to pods whose certificate nobody knows": (
        {**TLS, "route": {"enabled": True, "parentRefs": [{"name": "public"}]}},
        "route.backendTLS.caCertificateRefs: is needed with route.enabled and tls.enabled",
    ),
    "a gateway's address as a setting": (
        {"gateway": {"settings": {"coordinator_address": "x:1"}}},
        "gateway.settings.coordinator_address: is the chart's own",
    ),
    "processes of a gateway's pod": (
        {"gateway": {"settings": {"num_processes": 2}}},
        "gateway.settings.num_processes: is set by gateway.replicas",
    ),
    "a gateway with a model": ({"gateway": {"model": {"from": "pvc"}}}, "additional properties 'model' not allowed"),
    "a bucket and a repository": (
        {"target": {"model": {"from": "download", "download": {"url": "s3://a-bucket/x", "repository": "own/er"}}}},
        "target.model.download.url: is s3://a-bucket/x, and download.repository is own/er; set one of them",
    ),
    "a bucket of another kind": (
        {"target": {"model": {"from": "download", "download": {"url": "ftp://a/b"}}}},
        "at '/target/model/download/url'",
    ),
    "an image that is not named": (
        {"draft": {"model": {"from": "oci"}}},
        "draft.model.oci.reference: is needed with model.from=oci",
    ),
    "GPUs shared over nodes": (
        {"sharedGpus": {"enabled": True}},
        "sharedGpus.enabled: the containers of one pod share GPUs; placement is spread",
    ),
    "more GPUs than are shared": (
        {
            "placement": "samePod",
            "sharedGpus": {"enabled": True},
            "target": {"tensorParallelSize": 2},
            "draft": {"settings": {"num_pages": 100}},
        },
        "target.tensorParallelSize: is 2; sharedGpus.count is 1",
    ),
    "a GPU shared without saying how": (
        {"placement": "samePod", "sharedGpus": {"enabled": True}, "target": {"settings": {"num_pages": 100}}},
        "draft.settings.gpu_memory_utilization: is needed with sharedGpus",
    ),
    "TLS without certificates": ({"tls": {"enabled": True}}, "is needed with tls.enabled: a Secret with tls.crt"),
    "cert-manager without an issuer": (
        {"tls": {"enabled": True, "certManager": {"enabled": True}}},
        "tls.certManager.issuer.name: is needed",
    ),
    "users' certificates without TLS": (
        {"tls": {"users": {"required": True}}},
        "tls.users.required: users show certificates over TLS alone",
    ),
    "a token in the clear": (
        {"tokens": {"links": {"name": "a", "key": "b"}}},
        "tokens.links: a token would cross the network in the clear",
    ),
    "a claim to make without a name": (
        {"target": {"model": {"claim": "", "from": "download", "createClaim": {"enabled": True}}}},
        "target.model.claim: is needed with model.createClaim.enabled",
    ),
    "a route from nowhere": ({"route": {"enabled": True}}, "route.parentRefs: is needed with route.enabled"),
    "half a secret": (over(TLS, {"tokens": {"api": {"name": "a"}}}), "at '/tokens/api'"),
    "a digest that is none": ({"target": {"image": {"digest": "latest"}}}, "at '/target/image/digest'"),
    "no time to drain": (
        {"target": {"drain": {"graceSeconds": -1}}},
        "at '/target/drain/graceSeconds': minimum: got -1, want 0",
    ),
    "a size without sense": ({"target": {"shmSize": "lots"}}, "at '/target/shmSize'"),
    "a budget of nothing": ({"target": {"pdb": {"maxUnavailable": 0}}}, "at '/target/pdb/maxUnavailable'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_refused_by_name(helm: Helm, name: str) -> None:
    values, message = REFUSED[name]
    with pytest.raises(RefusedError) as caught:
        helm.render(over(MODELS, values))
    said = str(caught.value)
    assert message in said
    assert len(said) < 700, "a message, not a dump"


def test_what_they_were_changed_from_is_not_refused(helm: Helm) -> None:
    assert helm.render(MODELS).workloads()
    assert helm.render(over(MODELS, TLS)).workloads()
