{{/* Checks of keys that do not fit together, which values.schema.json cannot express. Each message names what would be right. */}}
{{- define "outrider.check" -}}
{{- $root := . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "outrider.fullname" .)) }}
{{- fail (printf "\nfullnameOverride: %q cannot be the name of a Service; set one that begins with a letter and has only letters, digits and dashes" (include "outrider.fullname" .)) }}
{{- end }}
{{- $blocks := dict }}
{{- range (include "outrider.services" . | fromJson).names }}
{{- $_ := set $blocks . (include "outrider.block" (dict "root" $root "name" .) | fromJson) }}
{{- end }}
{{- if eq $blocks.target.model.from "none" }}
{{- fail "\ntarget.model.from: the large model is not set. Choose image, pvc, hostPath, download or oci, and target.model.path; k8s/outrider/examples has whole files." }}
{{- end }}
{{- if and .Values.draft.enabled .Values.draft.address }}
{{- fail (printf "\ndraft.address: is %s, a draft of another release; set draft.enabled=false" .Values.draft.address) }}
{{- end }}
{{- with $blocks.draft }}
{{- $method := .settings.method | default "" }}
{{- $isLookup := has $method (list "ngram" "suffix") }}
{{- if and (eq .device "cuda") (eq .model.from "none") $isLookup }}
{{- fail (printf "\ndraft.device: is cuda; looking guesses up (draft.settings.method=%s) needs no GPU, set it to cpu" $method) }}
{{- end }}
{{- if and (eq .model.from "none") (not $isLookup) }}
{{- fail "\ndraft.model.from: the small model is not set. Choose image, pvc, hostPath, download or oci; or draft.settings.method=ngram or suffix, which need none; or draft.enabled=false for no speculation." }}
{{- end }}
{{- end }}
{{- if ne $blocks.coordinator.device "none" }}
{{- fail (printf "\ncoordinator.device: is %s; the coordinator runs no model, leave it none" $blocks.coordinator.device) }}
{{- end }}
{{- range $name, $block := $blocks }}
{{- include "outrider.checkBlock" (dict "root" $root "name" $name "block" $block) }}
{{- end }}
{{- include "outrider.checkPlacement" (dict "root" $root "blocks" $blocks) }}
{{- include "outrider.checkSharedGpus" (dict "root" $root "blocks" $blocks) }}
{{- include "outrider.checkUsers" $root }}
{{- include "outrider.checkSecurity" $root }}
{{- end }}

{{/* One block by itself: dict "root" "name" "block". */}}
{{- define "outrider.checkBlock" -}}
{{- $name := .name }}
{{- $block := .block }}
{{- $model := $block.model }}
{{- if and (has $name (list "target" "draft")) (eq $block.device "none") }}
{{- fail (printf "\n%s.device: is none; a model runs on cuda or cpu" $name) }}
{{- end }}
{{- if and (eq $model.from "pvc") (not $model.claim) }}
{{- fail (printf "\n%s.model.claim: is needed with model.from=pvc: the name of the PersistentVolumeClaim that holds the model" $name) }}
{{- end }}
{{- if and $model.createClaim.enabled (ne $model.from "none") (not $model.claim) }}
{{- fail (printf "\n%s.model.claim: is needed with model.createClaim.enabled: the name of the claim to make" $name) }}
{{- end }}
{{- if and (eq $model.from "hostPath") (not $model.hostPath) }}
{{- fail (printf "\n%s.model.hostPath: is needed with model.from=hostPath: the folder on the node" $name) }}
{{- end }}
{{- if and (eq $model.from "download") (not $model.download.repository) (not $model.download.url) }}
{{- fail (printf "\n%s.model.download.repository: is needed with model.from=download: owner/name on the Hub; or download.url: s3://bucket/folder or gs://bucket/folder" $name) }}
{{- end }}
{{- if and (eq $model.from "download") $model.download.repository $model.download.url }}
{{- fail (printf "\n%s.model.download.url: is %s, and download.repository is %s; set one of them" $name $model.download.url $model.download.repository) }}
{{- end }}
{{- if and (eq $model.from "oci") (not $model.oci.reference) }}
{{- fail (printf "\n%s.model.oci.reference: is needed with model.from=oci: the image that holds the model, registry/name:tag" $name) }}
{{- end }}
{{- if and (eq $model.from "oci") (semverCompare "<1.31-0" .root.Capabilities.KubeVersion.Version) }}
{{- fail (printf "\n%s.model.from: is oci, a volume from an image; Kubernetes has these from 1.31 on, this is %s. Choose pvc or download" $name .root.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (eq $model.from "image") (not (hasPrefix "/" $model.path)) }}
{{- fail (printf "\n%s.model.path: %q should be an absolute path with model.from=image" $name $model.path) }}
{{- end }}
{{- if and (has $model.from (list "pvc" "hostPath" "download" "oci")) (hasPrefix "/" $model.path) }}
{{- fail (printf "\n%s.model.path: %q should be relative to the volume's root with model.from=%s" $name $model.path $model.from) }}
{{- end }}
{{- $owned := dict "host" "bindAddress" "port" "port" "device" "device" "model" "model" "tokenizer" "model" "tensor_parallel_size" "tensorParallelSize" "metrics_port" "metricsPort" "metrics_host" "bindAddress" "health_port" "healthPort" "health_host" "bindAddress" "drain_delay_s" "drain.delaySeconds" "drain_grace_s" "drain.graceSeconds" "enabled" "enabled" "num_processes" "replicas" "reuse_port" "replicas" "own_port" "replicas" }}
{{- $known := index (.root.Files.Get "files/settings.json" | fromJson) $name }}
{{- range $key, $value := $block.settings }}
{{- if not (has $key $known) }}
{{- $takers := list }}
{{- range $other, $keys := $.root.Files.Get "files/settings.json" | fromJson }}
{{- if has $key $keys }}
{{- $takers = append $takers (printf "%s.settings" $other) }}
{{- end }}
{{- end }}
{{- $hint := ternary (printf "%s take it" (join ", " $takers)) "docs/configuration.md has them all" (gt (len $takers) 0) }}
{{- fail (printf "\n%s.settings.%s: the %s has no such setting; %s" $name $key $name $hint) }}
{{- else if hasKey $owned $key }}
{{- fail (printf "\n%s.settings.%s: is set by %s.%s" $name $key $name (get $owned $key)) }}
{{- else if or (hasSuffix "_address" $key) (hasSuffix "_file" $key) (hasPrefix "max_connection_age" $key) (hasPrefix "coordinator_tls" $key) (has $key (list "allow_plaintext_token" "channels_between_hosts")) }}
{{- fail (printf "\n%s.settings.%s: is the chart's own; see placement, directChannels, tls, tokens and service in values.yaml" $name $key) }}
{{- end }}
{{- end }}
{{- if mod (int $block.tensorParallelSize) (int $block.hosts) }}
{{- fail (printf "\n%s.tensorParallelSize: %v GPUs cannot be shared out evenly over hosts=%v" $name $block.tensorParallelSize $block.hosts) }}
{{- end }}
{{- if and (gt (int $block.hosts) 1) (ne $name "target") }}
{{- fail (printf "\n%s.hosts: is %v; only the target runs on several hosts" $name $block.hosts) }}
{{- end }}
{{- if and (gt (int $block.hosts) 1) (ne $block.device "cuda") }}
{{- fail (printf "\n%s.hosts: is %v with device=%s; several hosts need cuda" $name $block.hosts $block.device) }}
{{- end }}
{{- if and (eq $block.device "none") (gt (int $block.tensorParallelSize) 1) }}
{{- fail (printf "\n%s.tensorParallelSize: is %v with device=none; there is no model to spread" $name $block.tensorParallelSize) }}
{{- end }}
{{- if gt (int $block.autoscaling.minReplicas) (int $block.autoscaling.maxReplicas) }}
{{- fail (printf "\n%s.autoscaling.minReplicas: %v is above maxReplicas %v" $name $block.autoscaling.minReplicas $block.autoscaling.maxReplicas) }}
{{- end }}
{{- include "outrider.checkScaling" (dict "root" .root "name" $name "block" $block) }}
{{- if and $block.strategy (gt (int $block.hosts) 1) }}
{{- fail (printf "\n%s.strategy: is a Deployment's; with hosts=%v the %s is a LeaderWorkerSet, which replaces one group at a time" $name $block.hosts $name) }}
{{- end }}
{{- end }}

{{/* What a block is scaled on: dict "root" "name" "block". */}}
{{- define "outrider.checkScaling" -}}
{{- $scaling := .block.autoscaling }}
{{- if $scaling.enabled }}
{{- if and (ne $scaling.kind "cpu") (not .root.Values.metrics.enabled) }}
{{- fail (printf "\n%s.autoscaling.enabled: scaling is on requests that run or wait, a metric; metrics.enabled is false" .name) }}
{{- end }}
{{- $coordinator := include "outrider.block" (dict "root" .root "name" "coordinator") | fromJson }}
{{- $coordinators := ternary $coordinator.autoscaling.maxReplicas $coordinator.replicas $coordinator.autoscaling.enabled }}
{{- $most := dig "max_running_requests" 256 $coordinator.settings }}
{{- if and (eq .name "target") (ne $scaling.kind "cpu") (not $scaling.query) (ge (int $scaling.requestsPerReplica) (mul (int $most) (int $coordinators))) }}
{{- fail (printf "\n%s.autoscaling.requestsPerReplica: %v should be below coordinator.settings.max_running_requests %v for each of %v coordinators, or requests wait before a replica is added" .name (int $scaling.requestsPerReplica) (int $most) (int $coordinators)) }}
{{- end }}
{{- if and $scaling.query (ne $scaling.kind "keda") }}
{{- fail (printf "\n%s.autoscaling.query: is asked by KEDA; kind is %s" .name $scaling.kind) }}
{{- end }}
{{- if and (eq .name "draft") (eq $scaling.kind "hpa") }}
{{- fail "\ndraft.autoscaling.kind: is hpa, on how many requests run or wait; more drafts do not change that: where a draft is full or late, steps go without it. Choose keda, or set draft.replicas" }}
{{- end }}
{{- if and (eq $scaling.kind "cpu") (eq .block.device "cuda") }}
{{- fail (printf "\n%s.autoscaling.kind: is cpu with device=cuda; the load of a GPU does not show in processor time, choose keda or hpa" .name) }}
{{- end }}
{{- if and (eq $scaling.kind "cpu") (not (dig "requests" "cpu" "" .block.resources)) }}
{{- fail (printf "\n%s.resources.requests.cpu: is needed with autoscaling.kind=cpu, which is a share of it" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Ports, pods and nodes of all blocks: dict "root" "blocks". */}}
{{- define "outrider.checkPlacement" -}}
{{- $root := .root }}
{{- with .blocks.gateway }}
{{- if eq (int .port) (int .metricsPort) }}
{{- fail (printf "\ngateway.metricsPort: is %v, as gateway.port is; they must be different ports" .metricsPort) }}
{{- end }}
{{- end }}
{{- range $name, $block := omit .blocks "gateway" }}
{{- if lt (list $block.port $block.metricsPort $block.healthPort | uniq | len) 3 }}
{{- fail (printf "\n%s: port %v, metricsPort %v and healthPort %v must be three different ports" $name $block.port $block.metricsPort $block.healthPort) }}
{{- end }}
{{- end }}
{{- if eq .root.Values.placement "samePod" }}
{{- range $name := list "coordinator" "draft" }}
{{- range $key := list "replicas" "autoscaling" "strategy" "pdb" "hosts" "hostNetwork" "shmSize" "podSecurityContext" "nodeSelector" "tolerations" "affinity" "topologySpread" "priorityClassName" "runtimeClassName" "schedulerName" "serviceAccount" "annotations" "podLabels" "podAnnotations" }}
{{- if hasKey (index $root.Values $name) $key }}
{{- fail (printf "\n%s.%s: belongs to the pod, which is the target's with placement=samePod; set target.%s" $name $key $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- $seen := dict }}
{{- range $name, $block := omit .blocks "gateway" }}
{{- if gt (int $block.hosts) 1 }}
{{- fail (printf "\n%s.hosts: is %v with placement=samePod; one pod is on one host" $name $block.hosts) }}
{{- end }}
{{- range $key := list "port" "metricsPort" "healthPort" }}
{{- $port := get $block $key | toString }}
{{- if and (hasKey $seen $port) (or (ne $key "port") (eq $name "coordinator")) }}
{{- fail (printf "\n%s.%s: %s is %s too; containers of one pod need ports of their own" $name $key $port (get $seen $port)) }}
{{- end }}
{{- if or (ne $key "port") (eq $name "coordinator") }}
{{- $_ := set $seen $port (printf "%s.%s" $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .root.Values.placement "sameNode") (gt (int .blocks.target.hosts) 1) }}
{{- fail (printf "\ntarget.hosts: is %v with placement=sameNode; choose spread" .blocks.target.hosts) }}
{{- end }}
{{- end }}

{{/* GPUs that target and draft share: dict "root" "blocks". */}}
{{- define "outrider.checkSharedGpus" -}}
{{- $root := .root }}
{{- with .root.Values.sharedGpus }}
{{- if .enabled }}
{{- if ne $root.Values.placement "samePod" }}
{{- fail (printf "\nsharedGpus.enabled: the containers of one pod share GPUs; placement is %s, set it to samePod" $root.Values.placement) }}
{{- end }}
{{- if semverCompare "<1.34-0" $root.Capabilities.KubeVersion.Version }}
{{- fail (printf "\nsharedGpus.enabled: is a ResourceClaim; Kubernetes has resource.k8s.io/v1 from 1.34 on, this is %s. See examples/one-gpu.yaml for time slicing" $root.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- $count := int .count }}
{{- range $name, $block := $.blocks }}
{{- if eq $block.device "cuda" }}
{{- if gt (int $block.tensorParallelSize) $count }}
{{- fail (printf "\n%s.tensorParallelSize: is %v; sharedGpus.count is %v" $name $block.tensorParallelSize $count) }}
{{- end }}
{{- $sized := false }}
{{- range list "gpu_memory_utilization" "kv_cache_bytes" "num_pages" }}
{{- $sized = or $sized (hasKey $block.settings .) }}
{{- end }}
{{- if not $sized }}
{{- fail (printf "\n%s.settings.gpu_memory_utilization: is needed with sharedGpus: by itself each program takes most of the memory that it finds free" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* How users reach the release. */}}
{{- define "outrider.checkUsers" -}}
{{- $root := . }}
{{- range $key, $service := dict "service" .Values.service "service.http" .Values.service.http }}
{{- if and $service.nodePort (eq $service.type "ClusterIP") }}
{{- fail (printf "\n%s.nodePort: is %v with %s.type=ClusterIP; set the type to NodePort or LoadBalancer" $key $service.nodePort $key) }}
{{- end }}
{{- if ne $service.type "LoadBalancer" }}
{{- range list "loadBalancerClass" "loadBalancerSourceRanges" }}
{{- if get $service . }}
{{- fail (printf "\n%s.%s: is set with %s.type=%s; set the type to LoadBalancer" $key . $key $service.type) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $service.externalTrafficPolicy (eq $service.type "ClusterIP") }}
{{- fail (printf "\n%s.externalTrafficPolicy: is set with %s.type=ClusterIP; set the type to NodePort or LoadBalancer" $key $key) }}
{{- end }}
{{- end }}
{{- range list "ingress" "httpRoute" }}
{{- if and (index $root.Values .).enabled (not $root.Values.gateway.enabled) }}
{{- fail (printf "\n%s.enabled: leads to the gateway's HTTP; gateway.enabled is false. For gRPC, set route.enabled" .) }}
{{- end }}
{{- end }}
{{- range list "route" "httpRoute" }}
{{- if and (index $root.Values .).enabled (not (index $root.Values .).parentRefs) }}
{{- fail (printf "\n%s.parentRefs: is needed with %s.enabled: the Gateway that users reach, as [{name: ...}]" . .) }}
{{- end }}
{{- end }}
{{- range list "route" "httpRoute" }}
{{- $route := index $root.Values . }}
{{- if and $route.enabled $root.Values.tls.enabled $route.backendTLS.enabled (not $route.backendTLS.caCertificateRefs) }}
{{- fail (printf "\n%s.backendTLS.caCertificateRefs: is needed with %s.enabled and tls.enabled: the ConfigMap with the ca.crt by which the Gateway knows the pods' certificate, as [{group: \"\", kind: ConfigMap, name: ...}]. Where a policy of your own makes the Gateway speak TLS, set %s.backendTLS.enabled to false" . . .) }}
{{- end }}
{{- end }}
{{- range $key, $value := .Values.commonLabels }}
{{- if has $key (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/part-of" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") }}
{{- fail (printf "\ncommonLabels.%s: is a label of the chart's own; choose another key" $key) }}
{{- end }}
{{- end }}
{{- $coordinator := include "outrider.block" (dict "root" . "name" "coordinator") | fromJson }}
{{- if and $coordinator.hostNetwork .Values.networkPolicy.enabled (ne .Values.placement "samePod") (not .Values.networkPolicy.extraIngress) }}
{{- fail "\ncoordinator.hostNetwork: its pods call from the node's address, which the NetworkPolicies of target and draft do not admit; name the nodes in networkPolicy.extraIngress, or set networkPolicy.enabled=false" }}
{{- end }}
{{- end }}

{{- define "outrider.checkSecurity" -}}
{{- $root := . }}
{{- with .Values.tls }}
{{- if and .enabled .certManager.enabled (not .certManager.issuer.name) }}
{{- fail "\ntls.certManager.issuer.name: is needed with tls.certManager.enabled: the Issuer or ClusterIssuer that signs" }}
{{- end }}
{{- if and .enabled (not .certManager.enabled) }}
{{- range (include "outrider.services" $root | fromJson).names }}
{{- if and (include "outrider.hasCertificate" (dict "root" $root "name" .)) (not (index $root.Values.tls.secrets .)) }}
{{- fail (printf "\ntls.secrets.%s: is needed with tls.enabled: a Secret with tls.crt, tls.key and ca.crt; or let tls.certManager.enabled make one" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .users.required (not .enabled) }}
{{- fail "\ntls.users.required: users show certificates over TLS alone; set tls.enabled" }}
{{- end }}
{{- end }}
{{- with .Values.tracing.endpoint }}
{{- if not (regexMatch ":[0-9]+$" (urlParse .).host) }}
{{- fail (printf "\ntracing.endpoint: %s has no port; a collector listens on 4317 (grpc) or 4318 (http/protobuf)" .) }}
{{- end }}
{{- end }}
{{- if and .Values.tokens.links.name (not .Values.tls.enabled) (ne .Values.placement "samePod") }}
{{- fail "\ntokens.links: a token would cross the network in the clear; set tls.enabled, or placement=samePod" }}
{{- end }}
{{- end }}
